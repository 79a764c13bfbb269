// Sizes of the KV page pools of one process: --kv-bytes auto (docs/operating.md, "Size the pools").
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/engine.h"

namespace spl {

// Memory that the pools are cut from, once the weights are loaded.
struct KvRoom {
  bool on_host = false;  // true: all ranks and other programs share it
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};

// One page pool. With tensor parallelism its pages lie evenly on the devices of all ranks.
struct KvPoolNeed {
  std::string name;               // "prefill" or "decode", for the log
  std::optional<uint64_t> bytes;  // the size that was asked for; nullopt: auto
  int64_t max_context = 0;        // tokens of the longest sequence
  uint64_t sequence_bytes = 0;    // KV of one such sequence, on all ranks
  int32_t max_sequences = 0;      // that run at once
  int32_t num_ranks = 1;
  uint64_t other_bytes = 0;  // on each device: the engine's workspace, and other pools of the same worker
};

struct KvPoolSize {
  uint64_t bytes = 0;  // on all ranks
  std::string why;
};

// Divides `room` between the pools of a process; a pool whose size was asked for gets that.
//
// On a GPU the pools get what is free, less KvMargin(total) and other_bytes. On the CPU they get a quarter of what is
// free, and more, up to a half, where a pool would not hold one sequence of max_context otherwise. The pools have equal
// shares. A pool gets no more than max_sequences sequences of max_context need, on the CPU no more than 8 of them; what
// one pool does not need goes to the others. ResourceExhausted: a pool would hold less than 256 tokens; the message
// names what takes the memory and the flags to set.
absl::StatusOr<std::vector<KvPoolSize>> DivideKvRoom(const KvRoom& room, std::span<const KvPoolNeed> pools);

// Part of a GPU that auto leaves free, for what methods allocate when they first run and for fragmentation: 6 %, at
// least 1 GiB.
uint64_t KvMargin(uint64_t total_bytes);

// Tokens that `bytes` of the pool hold.
int64_t TokensOfPool(const KvPoolNeed& pool, uint64_t bytes);

// The need of one engine of `model`; other_bytes is the workspace of an executor with `options`.
KvPoolNeed NeedOfPool(const std::string& name, std::optional<uint64_t> bytes, const engine::Model& model,
                      const engine::ExecutorOptions& options);

// Reads the memory of the model's devices and divides it; logs each pool's size, its tokens and why (kv_pool.sized),
// and a warning where a pool does not hold one sequence of the model's max context (kv_pool.small). `model` is the one
// with the most ranks. Returns the bytes of each pool. Errors: those of DivideKvRoom and of Backend::Memory.
absl::StatusOr<std::vector<uint64_t>> SizeKvPools(const engine::Model& model, std::span<const KvPoolNeed> pools);

}  // namespace spl
