// The turns of a prefill engine and a decode engine that share a device: which of them runs its next step.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

namespace spl::engine {

struct StepOffer;  // step_offer.h

// One engine has the turn at a time, so that the cores (or the GPU and its collectives) never work for both at once.
//
// Prompts go first, because a decode step costs about the same whatever its number of rows: while prompts are computed,
// more sequences gather for the next one. `itl_target` bounds how long running sequences wait: a decode step is due
// when its tokens would come later than that behind the last ones. A step that is due gets the next turn. Where the
// target is shorter than the steps themselves, slices and steps alternate.
//
// A decode step that waits may be taken along by a pass of prompts: its rows cost such a pass little more than the
// reading of their KV. The next pass then waits a moment for the step behind that one.
//
// Thread-safe; outlives its turns. Nobody waits for anything else while it has the turn.
class StepTurns {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Work : uint8_t { kPrompts, kDecoding };

  static constexpr std::chrono::milliseconds kDefaultItlTarget{50};
  // Target of a worker that was told `named_ms`, or nothing. nullopt: its engines take no turns, because a GPU runs the
  // kernels of one while the other waits for its host.
  static std::optional<std::chrono::milliseconds> TargetOf(std::optional<int64_t> named_ms, bool host_memory) {
    if (named_ms.has_value()) return std::chrono::milliseconds(*named_ms);
    return host_memory ? std::optional(kDefaultItlTarget) : std::nullopt;
  }
  explicit StepTurns(std::chrono::nanoseconds itl_target = kDefaultItlTarget) : itl_target_(itl_target) {}

  class Turn {
   public:
    Turn() = default;  // nobody's
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)), work_(other.work_) {}
    Turn& operator=(Turn&& other) noexcept {
      End();
      turns_ = std::exchange(other.turns_, nullptr);
      work_ = other.work_;
      return *this;
    }
    ~Turn() { End(); }
    void End();
    bool held() const { return turns_ != nullptr; }

   private:
    friend class StepTurns;
    Turn(StepTurns& turns, Work work) : turns_(&turns), work_(work) {}
    StepTurns* turns_ = nullptr;
    Work work_ = Work::kPrompts;
  };

  // Blocks until it is this work's turn. Equals go in the order in which they asked.
  Turn Take(Work work);
  // `turns` may be null: the device is the caller's alone.
  static Turn TakeOf(StepTurns* turns, Work work) { return turns == nullptr ? Turn() : turns->Take(work); }

  // For a decode step: as Take, but a pass of prompts may take the step along meanwhile. nullopt: it did, and `offer`
  // says what came of it.
  std::optional<Turn> TakeOrRide(StepOffer& offer);
  // For a pass of prompts, which has the turn. Rows of the step that waits to be taken along; 0: none does.
  size_t num_offered() const;
  // Takes it along: until Land it is the caller's. Null: none waits.
  StepOffer* Board();
  void Land(StepOffer& offer);
  // This pass could not take along what was offered: the step gets a turn when it is due.
  void CannotBoard();

  // Whether a prompt has a slice to run, also between two of its turns.
  void SetPromptsReady(bool ready);
  // Lets a decode step go in front of prompts that can wait: returns when one has ended, or nothing is decoded, or
  // after `at_most`.
  void WaitForStep(std::chrono::nanoseconds at_most);

  // Whether sequences wait for their next token, also between two of their turns.
  void SetDecoding(bool decoding);

  // Notes the work done: rows of prompts, tokens of running sequences. Prompt rows for each token, over the last
  // seconds, is what a pass should have for each row that it takes along: with fewer prompts would queue, with more
  // running sequences would get tokens in steps of their own, which cost the reading of all weights.
  void NotePrompts(int64_t rows) { Note(rows, 0); }
  void NoteTokens(int64_t tokens) { Note(0, tokens); }
  double PromptRowsPerToken() const;  // 0: nothing is known
  std::chrono::nanoseconds itl_target() const { return itl_target_; }

  // Time that a slice of a prompt may take before the next decode step is due, at least 0; max(): nothing is decoded.
  std::chrono::nanoseconds TimeToDecode() const;
  uint64_t num_waiting() const;  // for a turn, now
  uint64_t num_rides() const;    // decode steps that were taken along so far

 private:
  struct Line {            // of one kind of work
    uint64_t next = 0;     // number of who asks next
    uint64_t serving = 0;  // number of who has the turn, or gets it
    bool waits() const { return next > serving; }
  };
  Line& line(Work work) { return lines_[static_cast<size_t>(work)]; }
  void Note(int64_t rows, int64_t tokens);
  Turn WaitForTurn(std::unique_lock<std::mutex>& lock, Work work, StepOffer* offer, bool& rode);
  bool MayTakeLocked(Work work, Time now) const;
  bool AwaitsOfferLocked(Time now) const;
  Time DueLocked() const;

  const std::chrono::nanoseconds itl_target_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::array<Line, 2> lines_;  // those that ask or have the turn, by Work
  bool taken_ = false;
  bool prompts_ready_ = false;
  bool decoding_ = false;
  bool last_decoded_ = false;  // kind of the last turn
  Time turn_start_;
  Time last_step_;                              // end of the last decode turn
  std::chrono::nanoseconds step_time_{0};       // smoothed length of decode turns
  StepOffer* offered_ = nullptr;                // the step that waits and may be taken along
  StepOffer* aboard_ = nullptr;                 // the one that was
  bool boards_ = true;                          // passes of prompts take steps along
  bool landed_ = false;                         // the last pass did; the next step is being prepared
  uint64_t num_rides_ = 0, num_turns_ = 0;      // the second: of decode steps
  double recent_rows_ = 0, recent_tokens_ = 0;  // each decays with kMemory
  Time noted_;
};

}  // namespace spl::engine
