// What a simulation takes for the workers: how long prompts, fetches and decode steps take, and what is cached where.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "services/router/fleet/prefix_index.h"

namespace spl::cli {

// Defaults: one H200 with a model of the llama-3.1-8b shape, docs/results/2026-11-21-cuda-engine.md: 47.1, 218.8 and
// 1,257.5 ms for prompts of 2,048, 8,192 and 32,768 tokens, steps of 4.08 to 12.55 ms for 1 to 32 sequences of 8K.
struct SimModel {
  double prompt_fixed_s = 0.002;     // RPCs, staging
  double prompt_token_s = 22.0e-6;   // per computed token …
  double prompt_square_s = 5.0e-10;  // … and per pair of computed and earlier token, as n² - (n - computed)²
  double aligned_cost = 0.25;        // of an aligned token, in computed ones
  double step_fixed_s = 3.8e-3;      // of a decode step …
  double step_token_s = 3.3e-8;      // … and per token of KV in its batch
  uint64_t kv_bytes_per_token = 131'072;
  double wire_bytes_per_s = 40e9;
  double wire_overlap = 0.8;
  double wire_share = 1;                 // what head classes leave of the KV
  double fetch_bytes_per_s = 0;          // of a chunk store behind the prefill workers; 0: there is none
  uint64_t prefill_kv_tokens = 400'000;  // what a prefill worker's pool holds
  uint64_t decode_kv_tokens = 800'000;
  uint32_t max_sequences = 256;
};

// Least recently used keys of a bounded number of tokens.
class SimCache {
 public:
  explicit SimCache(uint64_t max_tokens) : max_tokens_(max_tokens) {}
  bool Has(const chunk::ChunkKey& key) const { return by_key_.contains(key); }
  void Put(const chunk::ChunkKey& key, uint32_t tokens);  // or use it

 private:
  const uint64_t max_tokens_;
  uint64_t tokens_ = 0;
  std::list<std::pair<chunk::ChunkKey, uint32_t>> by_age_;  // newest first
  std::unordered_map<chunk::ChunkKey, std::list<std::pair<chunk::ChunkKey, uint32_t>>::iterator, chunk::ChunkKeyHash>
      by_key_;
};

struct SimReuse {
  uint32_t prefix = 0, aligned = 0, fetched = 0, computed = 0;  // tokens
};

// A prefill worker: prompts one after the other; what it computed is cached.
class SimPrefill {
 public:
  explicit SimPrefill(const SimModel& model) : model_(model), cache_(model.prefill_kv_tokens) {}

  // What a prompt of `tokens` finds here now, and takes; `store` may be null.
  SimReuse Look(const router::PromptKeys& keys, uint32_t tokens, const SimCache* store) const;
  double Seconds(const SimReuse& reuse, uint32_t tokens) const;
  // Computed: its exact chunks, and the segments, are cached (and stored). Segments that first appear behind a copy are
  // computed by themselves while the worker is idle; that is counted as done.
  void Keep(const router::PromptKeys& keys, uint32_t tokens, const SimReuse& reuse, SimCache* store);

  double busy_s = 0;
  uint64_t requests = 0;
  uint64_t queued_tokens = 0;  // to compute, of all that are here
  double tokens_per_s = 0;     // smoothed, as a worker reports it

 private:
  const SimModel& model_;
  SimCache cache_;
};

// A decode worker as a fluid: every sequence gets a token per step, a step takes what the batch makes it take.
class SimDecode {
 public:
  explicit SimDecode(const SimModel& model) : model_(model) {}

  bool HasRoom(uint32_t tokens) const;
  void Reserve(uint32_t tokens);  // prompt and output: the whole sequence
  void Release(uint32_t tokens);
  // From now on it decodes.
  void Join(double now_s, uint64_t request, uint32_t prompt, uint32_t output);
  // When the next sequence ends, if nothing changes.
  std::optional<double> NextEnd() const;
  // The sequences that have ended by now.
  std::vector<uint64_t> Advance(double now_s);
  double StepSeconds() const { return model_.step_fixed_s + model_.step_token_s * kv_tokens_; }

  uint32_t reserved_sequences = 0;  // running ones included
  uint64_t reserved_tokens = 0;
  uint64_t version = 0;  // changes with the batch: events of earlier ones are stale

 private:
  struct Sequence {
    uint64_t request = 0;
    double kv_tokens = 0;  // in the mean over its life
  };
  const SimModel& model_;
  double last_s_ = 0;
  double steps_ = 0;  // since the beginning
  double kv_tokens_ = 0;
  std::multimap<double, Sequence> by_end_;  // in steps
};

}  // namespace spl::cli
