// Model of the workers in a simulation: durations of prompts, fetches and decode steps, and contents of caches.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "services/router/fleet/prefix_index.h"
#include "services/router/fleet/snapshot.h"

namespace spl::cli {

// Defaults: one H200 with a model of the llama-3.1-8b shape, docs/results/2026-11-21-cuda-engine.md: 47.1, 218.8 and
// 1,257.5 ms for prompts of 2,048, 8,192 and 32,768 tokens, steps of 4.08 to 12.55 ms for 1 to 32 sequences of 8K.
struct SimModel {
  double prompt_fixed_s = 0.002;     // RPCs, staging
  double prompt_token_s = 22.0e-6;   // per computed token
  double prompt_square_s = 5.0e-10;  // per n² - (n - computed)², pairs of computed and earlier tokens
  double aligned_cost = 0.25;        // cost of an aligned token, in computed tokens
  double step_fixed_s = 3.8e-3;      // per decode step
  double step_token_s = 3.3e-8;      // per step and token of KV in its batch
  uint64_t kv_bytes_per_token = 131'072;
  double wire_bytes_per_s = 40e9;
  double wire_overlap = 0.8;
  double wire_share = 1;                 // share of the KV that head classes keep
  double fetch_bytes_per_s = 0;          // rate of the chunk store behind the prefill workers; 0: there is none
  uint64_t prefill_kv_tokens = 400'000;  // capacity of a prefill worker's pool
  uint64_t decode_kv_tokens = 800'000;
  uint32_t max_sequences = 256;
};

// LRU cache of keys, bounded by their number of tokens.
class SimCache {
 public:
  explicit SimCache(uint64_t max_tokens) : max_tokens_(max_tokens) {}
  bool Has(const chunk::ChunkKey& key) const { return by_key_.contains(key); }
  void Put(const chunk::ChunkKey& key, uint32_t tokens);  // adds the key, or counts a use

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

// A prefill worker: runs prompts one after the other and caches what it computes.
class SimPrefill {
 public:
  explicit SimPrefill(const SimModel& model) : model_(model), cache_(model.prefill_kv_tokens) {}

  // Reuse that a prompt of `tokens` finds here now. `store` null: there is no chunk store.
  SimReuse Look(const router::PromptKeys& keys, uint32_t tokens, const SimCache* store) const;
  double Seconds(const SimReuse& reuse, uint32_t tokens) const;
  // Call when a prompt is computed: caches (and stores) its exact chunks and its segments. A worker computes segments
  // that first appear behind a copy by themselves while it is idle; here this takes no time.
  void Keep(const router::PromptKeys& keys, uint32_t tokens, const SimReuse& reuse, SimCache* store);

  // Writes what a poll of the router finds.
  void Report(router::PrefillView* view) const;

  double busy_s = 0;
  uint64_t requests = 0;
  uint64_t queued_tokens = 0;  // tokens that all prompts here still have to compute
  double tokens_per_s = 0;     // smoothed, like a worker's report

 private:
  const SimModel& model_;
  SimCache cache_;
};

// A decode worker as a fluid model: every sequence gets one token per step, and the batch decides a step's duration.
class SimDecode {
 public:
  explicit SimDecode(const SimModel& model) : model_(model) {}

  bool HasRoom(uint32_t tokens) const;
  void Reserve(uint32_t tokens);  // `tokens`: the whole sequence, prompt and output
  void Release(uint32_t tokens);
  // The request begins to decode.
  void Join(double now_s, uint64_t request, uint32_t prompt, uint32_t output);
  // Time in seconds at which the next sequence ends if the batch does not change. nullopt: there is none.
  std::optional<double> NextEnd() const;
  // Advances to `now_s`; returns the requests whose sequences have ended.
  std::vector<uint64_t> Advance(double now_s);
  double StepSeconds() const { return model_.step_fixed_s + model_.step_token_s * kv_tokens_; }

  uint32_t reserved_sequences = 0;  // including running ones
  uint64_t reserved_tokens = 0;
  uint64_t version = 0;  // changes with the batch; events of earlier versions are stale

 private:
  struct Sequence {
    uint64_t request = 0;
    double kv_tokens = 0;  // mean over its life
  };
  const SimModel& model_;
  double last_s_ = 0;
  double steps_ = 0;  // steps since the start
  double kv_tokens_ = 0;
  std::multimap<double, Sequence> by_end_;  // key: value of steps_ at its end
};

}  // namespace spl::cli
