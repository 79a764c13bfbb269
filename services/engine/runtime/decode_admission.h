// Moves sequences from the waiting queue to the running batch of a decode engine.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "services/engine/runtime/decode_batch.h"
#include "services/engine/runtime/decode_preemption.h"
#include "services/engine/runtime/decode_start.h"

namespace spl::engine {

struct DecodeAdmissionOptions {
  int32_t max_rows = 0;         // rows of a step: the size of the batch
  int64_t gathered_tokens = 0;  // DecodeEngineOptions::gathered_tokens
};

// Engine thread.
class DecodeAdmission {
 public:
  // All outlive it.
  DecodeAdmission(DecodeBatch& batch, DecodePreemption& preemption, DecodeStart& start,
                  const DecodeAdmissionOptions& options)
      : batch_(batch), preemption_(preemption), start_(start), options_(options) {}

  // Admits sequences in order of arrival. A sequence that finds no pages blocks those behind it, which could not grow
  // either. A sequence that must first run slices does not block: one slice, of one of them, runs between two steps of
  // the batch.
  void AdmitWaiting();

 private:
  struct Round;
  enum class Ready {
    kNow,       // it has its continuations and their pages
    kLater,     // later sequences may be ready
    kNextStep,  // and later sequences wait, too
  };
  // Swaps in a preempted sequence, runs a slice, or starts the sequence. ResourceExhausted: there are no pages. Other
  // errors end it.
  absl::StatusOr<Ready> Advance(DecodeSequence& next, Round& round);

  DecodeBatch& batch_;
  DecodePreemption& preemption_;
  DecodeStart& start_;
  const DecodeAdmissionOptions options_;
};

}  // namespace spl::engine
