// Decides which sequences of a decode engine keep their KV in host memory, and when their pages move there
// (docs/decisions/0019-host-tier.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/host_kv.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/decode_batch.h"

namespace spl::engine {

struct HostTierOptions {
  size_t bytes = 0;        // page-locked host memory for KV; 0: there is no host tier
  int32_t hot_tokens = 0;  // slots of a hot buffer, rounded up to pages; 0: twice the budget
  // Pages that move between two steps: whole layers of a sequence, at least one. The steps of all sequences wait for
  // them, 128 MiB about 2.5 ms.
  size_t moved_bytes = size_t{128} << 20;
  int32_t pages_at_once = 16;  // full pages of an answer that move together
};

// A sequence moves if it decodes by `sparcas` with packed keys, with one continuation, and is at least twice as long as
// its hot buffer. Its first step that chooses has packed the keys then. Later pages follow, some at a time. Engine
// thread, except for the host memory.
class HostTier {
 public:
  // `model` and `pool` outlive it. `make_room`: as in DecodePreemption. Errors are those of HostKv::Create.
  static absl::StatusOr<std::unique_ptr<HostTier>> Create(const Model& model, PagePool& pool,
                                                          std::function<bool(int64_t)> make_room,
                                                          const HostTierOptions& options);

  // Whether MoveSome has something to do.
  bool HasWork(const DecodeBatch& batch) const;
  // Moves pages of running sequences. One that finds no room stays on the device for now; one that fails ends with
  // Internal. REQUIRES: no step is under way.
  void MoveSome(DecodeBatch& batch);
  const HostKv& memory() const { return *host_; }

 private:
  HostTier(const Model& model, PagePool& pool, std::function<bool(int64_t)> make_room, const HostTierOptions& options,
           std::unique_ptr<HostKv> host)
      : model_(model), pool_(pool), make_room_(std::move(make_room)), options_(options), host_(std::move(host)) {}
  // The next layer of a sequence to move, and how many of its leading pages shall be on the host then.
  struct Work {
    std::vector<int32_t> streams;
    int32_t end = 0;
  };
  // Nullopt: there is nothing to do.
  std::optional<Work> NextOf(const DecodeSequence& sequence) const;
  // Slots of the sequence's hot buffer; nullopt: it keeps its pages.
  std::optional<int32_t> SlotsOf(const DecodeSequence& sequence) const;
  absl::Status Move(DecodeSequence& sequence, const Work& work);
  void WaitForMore(DecodeFork& fork) const;

  const Model& model_;
  PagePool& pool_;
  const std::function<bool(int64_t)> make_room_;
  const HostTierOptions options_;
  const std::unique_ptr<HostKv> host_;
};

}  // namespace spl::engine
