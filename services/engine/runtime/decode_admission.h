// Which of the sequences that wait join the batch of a decode engine, and when.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "services/engine/runtime/decode_batch.h"
#include "services/engine/runtime/decode_preemption.h"
#include "services/engine/runtime/decode_start.h"

namespace spl::engine {

struct DecodeAdmissionOptions {
  int32_t max_rows = 0;         // of a step
  int64_t gathered_tokens = 0;  // DecodeEngineOptions::gathered_tokens
};

// Engine thread.
class DecodeAdmission {
 public:
  // All outlive it.
  DecodeAdmission(DecodeBatch& batch, DecodePreemption& preemption, DecodeStart& start,
                  const DecodeAdmissionOptions& options)
      : batch_(batch), preemption_(preemption), start_(start), options_(options) {}

  // Admits in the order in which they came: one that finds no room holds up those behind it, which could not grow
  // either. One that has slices to run does not: it runs one of them between two steps of the batch, and one slice is
  // run in all.
  void AdmitWaiting();

 private:
  struct Round;
  enum class Ready {
    kNow,       // it has its continuations and their pages
    kLater,     // those behind it may be ready
    kNextStep,  // and those behind it wait, too
  };
  // Brings back what gave way, runs a slice, or starts it. ResourceExhausted: there are no pages; other errors end it.
  absl::StatusOr<Ready> Advance(DecodeSequence& next, Round& round);

  DecodeBatch& batch_;
  DecodePreemption& preemption_;
  DecodeStart& start_;
  const DecodeAdmissionOptions options_;
};

}  // namespace spl::engine
