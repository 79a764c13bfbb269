// What a prefill worker does to send a sequence, without the computing in between: for benchmarks of transfers.
#pragma once

#include <chrono>
#include <functional>
#include <span>

#include "absl/status/status.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/prefill_work/page_sender.h"

namespace spl {

// Sends what `to` keeps of the sequence as a prompt of slices would: slice by slice, layer by layer. Complete, and with
// `flush` (null: none is needed) visible, on return.
absl::Status PushPages(prefill::PageSender& sender, const engine::SequenceKv& from, const engine::SequenceKv& to,
                       int32_t slice_tokens, const std::function<absl::Status()>& flush);

// DataLoss unless page target[i] holds what page source[i] does.
absl::Status ExpectEqualPages(const engine::PagePool& from, std::span<const int32_t> source, const engine::PagePool& to,
                              std::span<const int32_t> target);

}  // namespace spl
