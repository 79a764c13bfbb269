// Decides when a prefill engine and a decode engine on the same device run their next steps, and whether in one pass.
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

// How long the others wait for the step behind a pass that carried one.
struct StepGraces {
  std::chrono::nanoseconds offer = std::chrono::milliseconds(1);    // the next pass, until the step is described
  std::chrono::nanoseconds joins = std::chrono::microseconds(700);  // before, the step for prompts that join it
};

// kTurns: one engine has the turn at a time, so that the cores never work for both at once. Prompts go first, because a
// decode step costs about the same for any number of rows: while prompts are computed, more sequences gather for the
// next step. `itl_target` limits how long running sequences wait. A decode step is due when its tokens would otherwise
// come later than that after the last ones. A step that is due gets the next turn. If the target is shorter than the
// steps themselves, slices and steps alternate.
//
// A pass of prompts may carry a waiting decode step: its rows add little more than the reading of their KV. The next
// pass then waits a moment for the step after that one.
//
// kRides: nobody waits for a turn, and a GPU runs the kernels of one engine while the other waits for its host. But
// while prompts are computed, a step of few rows waits to be carried, at most until it is due: alone it would read all
// weights.
//
// Thread-safe; outlives its turns. A thread that has the turn must not wait for anything else.
class StepTurns {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Work : uint8_t { kPrompts, kDecoding };
  enum class Sharing : uint8_t { kTurns, kRides };

  static constexpr std::chrono::milliseconds kDefaultItlTarget{50};
  // Under kRides a step of more rows is not carried: it is bound by its own products and KV.
  static constexpr size_t kMostRiders = 64;
  // Unless prompts are long: a pass that keeps up with them has enough rows of its own.
  static constexpr size_t kMostRidersOfLongPrompts = 128;
  static constexpr double kLongPrompts = 12;  // PromptRowsPerToken
  explicit StepTurns(std::chrono::nanoseconds itl_target = kDefaultItlTarget, Sharing sharing = Sharing::kTurns,
                     const StepGraces& graces = {})
      : itl_target_(itl_target), sharing_(sharing), graces_(graces) {}

  class Turn {
   public:
    Turn() = default;  // held by none
    Turn(Turn&& other) noexcept
        : turns_(std::exchange(other.turns_, nullptr)), work_(other.work_), start_(other.start_) {}
    Turn& operator=(Turn&& other) noexcept {
      End();
      turns_ = std::exchange(other.turns_, nullptr);
      work_ = other.work_;
      start_ = other.start_;
      return *this;
    }
    ~Turn() { End(); }
    void End();
    bool held() const { return turns_ != nullptr; }

   private:
    friend class StepTurns;
    Turn(StepTurns& turns, Work work, Time start) : turns_(&turns), work_(work), start_(start) {}
    StepTurns* turns_ = nullptr;
    Work work_ = Work::kPrompts;
    Time start_;
  };

  // Blocks until it is this work's turn. Turns of the same work go in the order of the calls.
  Turn Take(Work work);
  // The same; `turns` null means that the device is not shared.
  static Turn TakeOf(StepTurns* turns, Work work) { return turns == nullptr ? Turn() : turns->Take(work); }

  // As Take, for a decode step that a pass of prompts may carry meanwhile. Returns nullopt if one did; `offer` then has
  // the results.
  std::optional<Turn> TakeOrRide(StepOffer& offer);
  // Whether a step of `rows` may be offered to a pass of prompts instead of running by itself.
  bool MayRide(size_t rows) const;
  // For a pass of prompts, which has the turn. Rows of the waiting step that it may carry; 0: none waits.
  size_t num_offered() const;
  // Rows that it should leave room for: those of the waiting step, or of one that will wait for the pass behind it.
  size_t num_riders() const;
  // Takes the step along: it belongs to the caller until Land. Null: none waits.
  StepOffer* Board();
  void Land(StepOffer& offer);
  // Under kRides. Prompts that ended with a pass go on as sequences: the next step that may be carried waits for them,
  // a moment at most. Call before Land. Joined: one has arrived, expected or not.
  void ExpectJoins(size_t prompts);
  void Joined();
  void WaitForJoins();  // by the engine that decodes, before it describes a step
  // Says that this pass can carry no step. The waiting one runs by itself: under kTurns when it is due, under kRides at
  // once.
  void CannotBoard();

  // Says whether a prompt has a slice to run, also between two of its turns.
  void SetPromptsReady(bool ready);
  // Lets a decode step go before prompts that can wait. Returns after a step has ended, if nothing is decoding, or
  // after `at_most`.
  void WaitForStep(std::chrono::nanoseconds at_most);

  // Says how many sequences wait for their next token, also between two of their turns.
  void SetDecoding(size_t sequences);

  // Record the work done: rows of prompts, tokens of running sequences. Their ratio over the last seconds is the number
  // of prompt rows that a pass should have for each row that it carries. With fewer, prompts would queue. With more,
  // running sequences would need steps of their own, which read all weights.
  void NotePrompts(int64_t rows) { Note(rows, 0); }
  void NoteTokens(int64_t tokens) { Note(0, tokens); }
  double PromptRowsPerToken() const;  // 0: not known yet
  std::chrono::nanoseconds itl_target() const { return itl_target_; }
  Sharing sharing() const { return sharing_; }

  // Time that a slice of a prompt may take before the next decode step is due, at least 0. max(): nothing is decoding,
  // or steps run beside the slice.
  std::chrono::nanoseconds TimeToDecode() const;
  uint64_t num_waiting() const;  // engines that wait for a turn now
  uint64_t num_rides() const;    // decode steps so far that were carried

 private:
  struct Line {            // for one kind of work
    uint64_t next = 0;     // number of the next one to ask
    uint64_t serving = 0;  // number of the one that has the turn, or gets it next
    bool waits() const { return next > serving; }
  };
  Line& line(Work work) { return lines_[static_cast<size_t>(work)]; }
  void Note(int64_t rows, int64_t tokens);
  Turn WaitForTurn(std::unique_lock<std::mutex>& lock, Work work, StepOffer* offer, bool& rode);
  bool MayTakeLocked(Work work, Time now, bool offers) const;
  bool MayRideLocked(size_t rows) const;
  double PromptRowsPerTokenLocked() const { return recent_tokens_ < 1 ? 0 : recent_rows_ / recent_tokens_; }
  bool AwaitsOfferLocked(Time now) const;
  bool AwaitsJoinsLocked(Time now) const;
  Time OfferByLocked() const;
  Time DueLocked() const;

  const std::chrono::nanoseconds itl_target_;
  const Sharing sharing_;
  const StepGraces graces_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::array<Line, 2> lines_;  // those that ask or have the turn, by Work
  bool taken_ = false;
  bool prompts_ready_ = false;
  size_t decoding_ = 0;                         // sequences
  bool last_decoded_ = false;                   // kind of the last turn
  Time last_step_;                              // end of the last decode turn
  std::chrono::nanoseconds step_time_{0};       // smoothed length of decode turns
  StepOffer* offered_ = nullptr;                // the waiting step, which may be carried
  StepOffer* aboard_ = nullptr;                 // the step that is being carried
  bool boards_ = true;                          // passes of prompts can carry steps
  bool landed_ = false;                         // the last pass carried one; the next step is being prepared
  size_t joining_ = 0;                          // prompts that ended with the last pass and have not joined
  bool joins_ = false;                          // some ended with it
  uint64_t num_rides_ = 0, num_turns_ = 0;      // num_turns_: turns of decode steps
  double recent_rows_ = 0, recent_tokens_ = 0;  // each decays with kMemory
  Time noted_;
};

}  // namespace spl::engine
