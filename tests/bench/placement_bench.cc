// What one placement decision costs: keys looked up in an index of a million chunks, then every worker scored.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>

#include "services/router/fleet/prefix_index.h"
#include "services/router/policies/placement.h"

namespace spl::router {
namespace {

constexpr size_t kChunks = 1 << 20;
constexpr size_t kPromptChunks = 128;  // 8K tokens
constexpr size_t kSegments = 64;

chunk::ChunkKey KeyOf(uint64_t chain, uint64_t i) {
  chunk::ChunkKey key;
  uint64_t state = chain * 0x9E3779B97F4A7C15ull + i * 0xBF58476D1CE4E5B9ull;
  for (size_t byte = 0; byte < key.bytes.size(); ++byte) {
    if (byte % 8 == 0) state = (state ^ (state >> 31)) * 0x94D049BB133111EBull + byte;
    key.bytes[byte] = static_cast<uint8_t>(state >> (byte % 8 * 8));
  }
  return key;
}

PromptKeys Prompt(uint64_t chain) {
  PromptKeys keys;
  for (size_t i = 0; i < kPromptChunks; ++i) keys.prefix.push_back(KeyOf(chain, i));
  for (uint32_t s = 0; s < kSegments; ++s) {
    keys.segments.push_back({.key = KeyOf(chain * kSegments + s, 1'000'000), .begin = s * 128, .end = s * 128 + 100});
  }
  return keys;
}

struct Fleet {
  FleetSnapshot snapshot;
  std::vector<PrefixIndex::Holder> holders;
  std::shared_ptr<LoadTracker> loads = std::make_shared<LoadTracker>();
  std::vector<LoadTracker::Hold> holds;

  // Every prefill worker is connected to 32 decode workers at most.
  explicit Fleet(size_t workers) {
    std::mt19937 random(1);
    const size_t pods = std::max<size_t>(1, workers / 32);
    for (size_t i = 0; i < workers; ++i) {
      const std::string n = std::to_string(i);
      PrefillView p{
          .worker_id = "prefill-" + n, .epoch = 1, .queued_tokens = random() % 20'000, .tokens_per_s = 40'000};
      for (size_t d = i % pods; d < workers; d += pods) {
        p.peers["decode-" + std::to_string(d)] = {.decode_epoch = 1, .bytes_per_s = 40e9};
      }
      snapshot.prefill.push_back(std::move(p));
      snapshot.decode.push_back({.worker_id = "decode-" + n,
                                 .epoch = 1,
                                 .sequences = static_cast<uint32_t>(random() % 60),
                                 .max_sequences = 64,
                                 .free_pages = random() % 1000,
                                 .total_pages = 1000,
                                 .step_seconds = 0.01,
                                 .max_sequence_tokens = 500'000,
                                 .kv_bytes_per_token = 131'072});
      holders.push_back({"prefill-" + n, 1});
      holds.push_back(loads->Add("prefill-" + n, {.prefill_tokens = random() % 20'000}));
      holds.push_back(loads->Add("decode-" + n, {.sequences = 1 + static_cast<uint32_t>(random() % 30)}));
    }
  }
};

// A decision as Generation::Place makes it, Insert included, on prompts that have been there before.
void BM_Decision(benchmark::State& state) {
  const Fleet fleet(static_cast<size_t>(state.range(0)));
  PrefixIndex index({.capacity = kChunks});
  const Placement placement({.seed = 1});
  std::mt19937_64 random(2);
  const size_t prompts = kChunks / (kPromptChunks + kSegments);
  const auto now = PrefixIndex::Clock::now();
  for (size_t i = 0; i < prompts; ++i) {
    index.Insert(Prompt(i), fleet.holders[random() % fleet.holders.size()], UINT32_MAX, now);
  }
  // One prompt that every worker has: as many presences as there can be.
  const PromptKeys hot = Prompt(0);
  for (const auto& holder : fleet.holders) index.Insert(hot, holder, UINT32_MAX, now);
  std::vector<double> times;
  for (auto _ : state) {
    state.PauseTiming();
    const PromptKeys keys = random() % 4 == 0 ? hot : Prompt(random() % prompts);
    state.ResumeTiming();
    const auto start = std::chrono::steady_clock::now();
    const auto reuse = index.Predict(keys, fleet.holders, now);
    const auto candidate = placement.Place({.fleet = fleet.snapshot,
                                            .loads = *fleet.loads,
                                            .prompt_tokens = kPromptChunks * 64 + 100,
                                            .total_tokens = kPromptChunks * 64 + 101,
                                            .reuse = reuse});
    index.Insert(keys, fleet.holders[candidate->prefill_idx], reuse[candidate->prefill_idx].exact_tokens, now);
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  state.counters["p50_us"] = times[times.size() / 2];
  state.counters["p99_us"] = times[times.size() * 99 / 100];
  state.counters["chunks"] = static_cast<double>(index.size());
}
BENCHMARK(BM_Decision)->Arg(8)->Arg(64)->Arg(256)->Arg(1024)->Unit(benchmark::kMicrosecond)->Iterations(3000);

}  // namespace
}  // namespace spl::router

BENCHMARK_MAIN();
