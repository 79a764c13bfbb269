// Sizes of a worker's passes where the operator names none, by its device
// (docs/results/2026-11-27-defaults-on-gpus.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace spl {

struct WorkerDefaults {
  // Tokens of a prefill slice. A GPU is half idle in slices of 512; beyond 2,048 a short prompt waits longer for its
  // turn, and nothing is gained. A prompt that shares the device with running sequences has shorter ones.
  int32_t slice_tokens = 0;
  // Sequences in a decode step. A GPU reads its weights for few of them as slowly as for many; on a CPU each one adds
  // its time.
  int32_t max_sequences = 0;
  // Prompts that hold pages at one time. A GPU computes as many short ones in a pass as fill it.
  size_t prompts_at_once = 0;
};

// `on_host`: the model's backend computes in host memory (Backend::host_memory).
constexpr WorkerDefaults DefaultsOf(bool on_host) {
  return on_host ? WorkerDefaults{.slice_tokens = 512, .max_sequences = 64, .prompts_at_once = 16}
                 : WorkerDefaults{.slice_tokens = 2048, .max_sequences = 256, .prompts_at_once = 64};
}

// The same with the numbers that an operator gave. 0: none was given.
constexpr WorkerDefaults SizesOf(bool on_host, int32_t slice_tokens, int32_t max_sequences) {
  WorkerDefaults sizes = DefaultsOf(on_host);
  if (slice_tokens > 0) sizes.slice_tokens = slice_tokens;
  if (max_sequences > 0) sizes.max_sequences = max_sequences;
  return sizes;
}

}  // namespace spl
