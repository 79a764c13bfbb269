// Pushes one request's KV into the pages of its ticket, layer by layer while later layers are being computed.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/kv_copy/crc32c_shifter.h"
#include "services/engine/engine.h"
#include "services/prefill_work/page_sender.h"
#include "services/prefill_work/prompt_delivery.h"
#include "services/prefill_work/ticket_guard.h"
#include "spl/v1/decode.pb.h"

namespace spl::prefill {

// Writes are started on the push worker's thread. A sender whose device waits by itself is given several layers at once
// when the engine has launched them, and the checksums of all come back at the commit; other senders get one layer
// after the other, once it is written. Pages that are announced early
// (LayerReady::early) are written while that thread has nothing else to do, and with the commit at the latest: a prompt
// with many copies that begins does not hold up the last layers of another one. No write starts after the ticket's
// lease has run out.
//
// Not sent: pages that the decode worker holds (Ticket.held_tokens); pages in a hole of the ticket, except those of
// restored heads, which are sent with the commit; pages without a kept token (LayerReady::kept); pages past the end of
// a shortened prompt (PrefillOutcome::only), which the decode worker takes back with the commit.
class KvPush final : public PromptDelivery {
 public:
  // ResourceExhausted: the only path to this decode worker leads through landing pages, and the ticket has none.
  // `classes`: head classes of the request; null: none. `hold` ends when the last write has been flushed.
  static absl::StatusOr<std::shared_ptr<KvPush>> Create(PushWorker& worker, std::shared_ptr<const Peer> peer,
                                                        const v1::Ticket& ticket, const engine::Model& model,
                                                        std::shared_ptr<const engine::StreamClasses> classes,
                                                        std::unique_ptr<TicketGuard::Hold> hold,
                                                        std::string request_id);

  void OnLayer(const engine::LayerReady& ready) override;
  int64_t num_bytes() const override;
  std::string carrier() const override { return peer_->carrier(); }

 private:
  KvPush(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket, const engine::Model& model,
         std::shared_ptr<const engine::StreamClasses> classes, std::unique_ptr<TicketGuard::Hold> hold,
         std::string request_id);
  // Pages of one Send.
  struct Pages {
    std::vector<int32_t> local;
    std::vector<uint32_t> remote;
    std::vector<std::shared_ptr<const kernels::Fence>> behind;
    std::vector<int32_t> targets;    // indices in the ticket's list; empty: those of `hole_of`
    std::optional<int32_t> hole_of;  // the restored stream in whose hole all these pages are
    std::vector<uint32_t> crcs;      // valid once the sender has finished
  };
  int32_t layers_at_once() const override;
  void AddKept(const engine::LayerReady& ready, int32_t stream, Pages& pages) const;
  engine::PageHole HoleOf(int32_t stream) const;
  // Sends the next layers of a queue; false: it was empty.
  bool SendNext(std::deque<engine::LayerReady>& queue);
  size_t BytesOf(const engine::LayerReady& ready) const;  // at most
  std::vector<engine::LayerReady> TakeNext(std::deque<engine::LayerReady>& queue);
  // Adds what is to be sent of a layer. An error is that of the prompt.
  absl::Status AddLayer(const engine::LayerReady& ready, Pages& pages);
  absl::Status CheckLease();
  // Waits for the sender, and files the checksums.
  void FinishSends();
  // The page's index in the ticket's list.
  int32_t TargetOf(int32_t stream, int32_t page) const;
  // The checksum over the stream's sent pages, with those of its hole if they were sent.
  uint32_t ChecksumOf(int32_t stream) const;
  // Starts to write the pages; they wait in sent_ for their checksums.
  absl::Status Send(const std::shared_ptr<const engine::SequenceKv>& kv, Pages pages);
  absl::Status SendRestored();
  void NoteOutcome(const engine::PrefillOutcome& outcome) override;
  void DoCommit() override;
  void CommitWritten();
  void DoAbort(const absl::Status& why, std::function<void()> done) override;
  std::shared_ptr<KvPush> Self() { return std::static_pointer_cast<KvPush>(shared_from_this()); }
  void Fail(const absl::Status& status);
  absl::Status status() const;

  const engine::KvShape shape_;
  const size_t page_bytes_;
  const kernels::Crc32cShifter over_a_page_;
  const std::shared_ptr<const engine::StreamClasses> classes_;
  const std::chrono::steady_clock::time_point lease_end_;

  const int32_t held_pages_;  // leading pages of each stream that are not sent

  // Used by the push thread only.
  std::deque<Pages> sent_;  // since the last FinishSends; outlives the sender, which fills in the checksums
  const std::unique_ptr<PageSender> sender_;
  const bool gathers_;  // several layers go into one Send
  // [num_streams]: index of the stream's first sent page in the ticket's list.
  std::vector<int32_t> first_target_;
  // [ticket's pages]: checksums of pages that were sent. They come in any order; a stream's checksum is over its pages
  // in theirs.
  std::vector<std::optional<uint32_t>> crcs_;
  std::map<int32_t, std::vector<uint32_t>> hole_crcs_;  // by stream: checksums of the pages in a restored head's hole

  // Pages that the commit adds, and pages that were left out; written before the commit is queued.
  int64_t restored_pages_ = 0, left_out_pages_ = 0;
  mutable std::mutex mutex_;  // guards all below
  absl::Status status_;
  // Not given to the sender yet, a few for each layer and stage: those of the passes' rows, which tasks of the push
  // thread or the commit take, and those that may go early.
  std::deque<engine::LayerReady> due_, early_;
  size_t due_bytes_ = 0;  // came to due_ since a task was queued for it
};

}  // namespace spl::prefill
