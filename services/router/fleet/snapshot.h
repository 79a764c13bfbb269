// The router's knowledge of its workers at one moment. Immutable once published: readers hold a shared_ptr and never
// lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "services/chunk/chunk.h"
#include "services/router/fleet/clock_offset.h"
#include "spl/v1/decode.pb.h"

namespace spl::router {

class PrefillWorker;
class DecodeWorker;

// A KV connection from a prefill worker to one life of a decode worker.
struct PeerLink {
  uint64_t decode_epoch = 0;
  std::string transport;
  double bytes_per_s = 0;
  double write_s = 0;   // cost of each additional write
  v1::KvWriter writer;  // for reservations, as the prefill worker reported it

  bool in_place() const { return transport == "in place"; }  // both workers have one pool: no KV moves
};

struct PrefillView {
  std::shared_ptr<PrefillWorker> worker;
  std::string worker_id;
  std::string address;
  std::string version;  // version and commit of its program; empty: it does not say
  uint64_t epoch = 0;
  uint64_t queued_tokens = 0;
  std::chrono::steady_clock::time_point asked_at;  // when the poll was sent that counted them
  double tokens_per_s = 0;
  double first_tokens_per_s = 0;   // rate of a prompt's first tokens; 0: unknown
  double pair_cost = 0;            // cost of a pair of a token and one in front of it, in such tokens
  uint64_t max_prompt_tokens = 0;  // 0: unknown
  uint64_t free_pages = 0, total_pages = 0;
  uint64_t total_tokens = 0;  // whose KV total_pages hold; 0: unknown
  bool draining = false;
  std::optional<ClockOffset> clock;       // its clock relative to ours
  std::map<std::string, PeerLink> peers;  // by decode worker_id; ready connections only
  bool reads_store = true;                // chunks in the store need not be computed
  bool structured_output = false;         // it keeps to SamplingParams.structured_output
  // Set for a decode worker that prefills short prompts itself (FleetSnapshot::local); that worker is its only peer.
  struct Local {
    std::string decode_id;
    uint32_t max_new_tokens = 0;
    uint32_t slice_tokens = 0;
  };
  std::optional<Local> local;

  // The worker that receives the calls, and that is lost when they break.
  const std::string& process_id() const { return local.has_value() ? local->decode_id : worker_id; }
};

struct DecodeView {
  std::shared_ptr<DecodeWorker> worker;
  std::string worker_id;
  std::string address;
  std::string version;  // as above
  uint64_t epoch = 0;
  uint32_t sequences = 0;  // running and reserved
  uint32_t running = 0;
  uint32_t max_sequences = 0;
  uint64_t free_pages = 0;
  uint64_t total_pages = 0;
  double step_seconds = 0;
  uint64_t max_sequence_tokens = 0;  // 0: unknown
  uint64_t kv_bytes_per_token = 0;   // 0: unknown
  bool draining = false;
  bool replays = false;              // it can continue an answer from its tokens (ReserveRequest.replay_token_ids)
  bool structured_output = false;    // it keeps to SamplingParams.structured_output
  std::optional<ClockOffset> clock;  // its clock relative to ours
};

struct FleetModel {
  bool known = false;  // a worker has answered
  std::string name;
  chunk::Digest fingerprint{};
  std::string layout_digest;
  uint32_t max_context = 0;
  uint32_t vocab_size = 0;
  std::string default_reuse;  // meaning of the policy "auto" for prompts with segments
  // The same for prompts of more than so many tokens; 0: there are none.
  uint32_t default_reuse_tokens = 0;
  std::string default_reuse_longer;
  std::string_view DefaultReuse(size_t num_tokens) const {
    return default_reuse_tokens > 0 && num_tokens > default_reuse_tokens ? default_reuse_longer : default_reuse;
  }
  std::string weights;  // types of weights and KV, as the workers call them
  std::string kv_dtype;
  uint32_t fp8_activation_rows = 0;  // as in ModelIdentity
  // Per layer, one letter per KV head: 'g' keeps everything while decoding, 'l' keeps a window. Empty: no head classes.
  std::vector<std::string> head_map;
};

// As workers say it. Not known: the identity has no fingerprint, because none has answered.
FleetModel FleetModelOf(const v1::ModelIdentity& identity);

// Lists only workers that answer and agree on the model.
struct FleetSnapshot {
  FleetModel model;
  std::vector<PrefillView> prefill;
  std::vector<DecodeView> decode;
  // Decode workers as places for short prompts, numbered after `prefill`: place i is prefill[i], or local[i - size].
  std::vector<PrefillView> local;

  size_t num_places() const { return prefill.size() + local.size(); }
  const PrefillView& place(size_t i) const { return i < prefill.size() ? prefill[i] : local[i - prefill.size()]; }
  bool had_pair = false;  // true of this snapshot or an earlier one

  // True if a prefill worker is connected to a decode worker, and neither is draining.
  bool HasUsablePair() const;
  // True if a request would be accepted: there is such a pair; or there was one, and now a decode worker prefills short
  // prompts itself, which is better than serving none. Before there was a pair, the other workers are about to come.
  bool Serves() const;
};

}  // namespace spl::router
