#include "services/engine/runtime/step_turns.h"

#include <algorithm>
#include <cmath>

#include "services/base/check.h"
#include "services/engine/runtime/step_offer.h"

namespace spl::engine {
namespace {

// A prompt's engine asks for its next turn within this time; if not, decoding does not wait for it.
constexpr std::chrono::milliseconds kGrace{10};
// How long what was done counts for how the next passes are made up.
constexpr std::chrono::duration<double> kMemory{4};

}  // namespace

StepTurns::Turn StepTurns::Take(Work work) {
  std::unique_lock lock(mutex_);
  bool rode = false;
  return WaitForTurn(lock, work, nullptr, rode);
}

std::optional<StepTurns::Turn> StepTurns::TakeOrRide(StepOffer& offer) {
  std::unique_lock lock(mutex_);
  bool rode = false;
  Turn turn = WaitForTurn(lock, Work::kDecoding, &offer, rode);
  if (rode) return std::nullopt;
  return turn;
}

StepTurns::Turn StepTurns::WaitForTurn(std::unique_lock<std::mutex>& lock, Work work, StepOffer* offer, bool& rode) {
  Line& own = line(work);
  const uint64_t number = own.next++;
  changed_.notify_all();  // the other kind may have waited for this one to ask
  bool offered = false;
  while (true) {
    const Time now = std::chrono::steady_clock::now();
    if (offer != nullptr && !offered && own.serving == number) {
      offered_ = offer;
      offered = true;
      changed_.notify_all();
    }
    if (offered && offered_ != offer && aboard_ != offer) {
      rode = true;
      ++own.serving;
      changed_.notify_all();
      return Turn();
    }
    if (own.serving == number && (offer == nullptr || aboard_ != offer) && MayTakeLocked(work, now, offered)) break;
    // Only the passing of time lets a decode step go in front of prompts that do not ask, or prompts go without a step.
    if (work == Work::kDecoding && sharing_ == Sharing::kRides)
      changed_.wait_until(lock, DueLocked());
    else if (work == Work::kDecoding && !taken_)
      changed_.wait_until(lock, std::max(DueLocked(), last_step_ + kGrace));
    else if (work == Work::kPrompts && AwaitsOfferLocked(now))
      changed_.wait_until(lock, OfferByLocked());
    else
      changed_.wait(lock);
  }
  if (work == Work::kDecoding) landed_ = false;
  if (offered) offered_ = nullptr;
  taken_ = sharing_ == Sharing::kTurns;
  return Turn(*this, work, std::chrono::steady_clock::now());
}

size_t StepTurns::num_offered() const {
  std::lock_guard lock(mutex_);
  return offered_ == nullptr ? 0 : offered_->rows.size();
}

size_t StepTurns::num_riders() const {
  std::lock_guard lock(mutex_);
  if (offered_ != nullptr) return offered_->rows.size();
  return sharing_ == Sharing::kRides && MayRideLocked(decoding_) ? decoding_ : 0;
}

bool StepTurns::MayRide(size_t rows) const {
  std::lock_guard lock(mutex_);
  return MayRideLocked(rows);
}

bool StepTurns::MayRideLocked(size_t rows) const {
  if (sharing_ == Sharing::kTurns) return true;
  const size_t most = PromptRowsPerTokenLocked() >= kLongPrompts ? kMostRidersOfLongPrompts : kMostRiders;
  return prompts_ready_ && boards_ && rows <= most && itl_target_.count() > 0;
}

StepOffer* StepTurns::Board() {
  std::lock_guard lock(mutex_);
  landed_ = false;
  boards_ = true;
  if (offered_ == nullptr) return nullptr;
  return aboard_ = std::exchange(offered_, nullptr);
}

void StepTurns::Land(StepOffer& offer) {
  std::lock_guard lock(mutex_);
  SPLICE_CHECK(aboard_ == &offer, "the step that was taken along");
  aboard_ = nullptr;
  ++num_rides_;
  landed_ = true;
  last_step_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void StepTurns::CannotBoard() {
  std::lock_guard lock(mutex_);
  landed_ = false;
  boards_ = false;
  if (sharing_ == Sharing::kRides) changed_.notify_all();
}

// The next step is on its way: a pass that waits for it takes it along.
bool StepTurns::AwaitsOfferLocked(Time now) const {
  return landed_ && decoding_ > 0 && offered_ == nullptr && now < OfferByLocked();
}

StepTurns::Time StepTurns::OfferByLocked() const {
  return last_step_ + graces_.offer + (joins_ ? graces_.joins : std::chrono::nanoseconds(0));
}

void StepTurns::ExpectJoins(size_t prompts) {
  if (sharing_ != Sharing::kRides) return;
  std::lock_guard lock(mutex_);
  joining_ = prompts;
  joins_ = prompts > 0;
}

void StepTurns::Joined() {
  std::lock_guard lock(mutex_);
  if (joining_ > 0 && --joining_ == 0) changed_.notify_all();
}

bool StepTurns::AwaitsJoinsLocked(Time now) const {
  return landed_ && joining_ > 0 && now < last_step_ + graces_.joins;
}

void StepTurns::WaitForJoins() {
  std::unique_lock lock(mutex_);
  while (AwaitsJoinsLocked(std::chrono::steady_clock::now())) changed_.wait_until(lock, last_step_ + graces_.joins);
}

// The time at which a decode step must start.
StepTurns::Time StepTurns::DueLocked() const {
  return last_step_ + std::max(itl_target_ - step_time_, std::chrono::nanoseconds(0));
}

bool StepTurns::MayTakeLocked(Work work, Time now, bool offers) const {
  if (taken_) return false;
  if (sharing_ == Sharing::kRides) {
    if (work == Work::kPrompts) return !AwaitsOfferLocked(now);
    return !offers || now >= DueLocked() || !MayRideLocked(offered_->rows.size());
  }
  const bool prompts_wait = lines_[static_cast<size_t>(Work::kPrompts)].waits();
  const bool due = now >= DueLocked(), rides = offered_ != nullptr && boards_;
  if (work == Work::kPrompts) {
    if (AwaitsOfferLocked(now)) return false;
    return rides || last_decoded_ || !due || !lines_[static_cast<size_t>(Work::kDecoding)].waits();
  }
  if (prompts_wait) return due && !last_decoded_ && !rides;
  if (prompts_ready_) return due && (!last_decoded_ || now >= last_step_ + kGrace);
  return true;
}

void StepTurns::SetPromptsReady(bool ready) {
  std::lock_guard lock(mutex_);
  if (std::exchange(prompts_ready_, ready) != ready) changed_.notify_all();
}

void StepTurns::WaitForStep(std::chrono::nanoseconds at_most) {
  std::unique_lock lock(mutex_);
  prompts_ready_ = false;
  changed_.notify_all();
  changed_.wait_for(lock, at_most, [&, before = num_turns_] { return num_turns_ != before || decoding_ == 0; });
}

void StepTurns::SetDecoding(size_t sequences) {
  std::lock_guard lock(mutex_);
  if ((std::exchange(decoding_, sequences) == 0) != (sequences == 0)) changed_.notify_all();
}

std::chrono::nanoseconds StepTurns::TimeToDecode() const {
  std::lock_guard lock(mutex_);
  if (decoding_ == 0 || sharing_ == Sharing::kRides) return std::chrono::nanoseconds::max();
  return std::max<std::chrono::nanoseconds>(DueLocked() - std::chrono::steady_clock::now(),
                                            std::chrono::nanoseconds(0));
}

uint64_t StepTurns::num_waiting() const {
  std::lock_guard lock(mutex_);
  uint64_t waiting = 0;
  for (const Line& line : lines_) waiting += line.next - line.serving;
  return waiting - (taken_ ? 1 : 0);
}

void StepTurns::Note(int64_t rows, int64_t tokens) {
  std::lock_guard lock(mutex_);
  const Time now = std::chrono::steady_clock::now();
  const double kept = std::exp(-std::chrono::duration<double>(now - std::exchange(noted_, now)) / kMemory);
  recent_rows_ = recent_rows_ * kept + static_cast<double>(rows);
  recent_tokens_ = recent_tokens_ * kept + static_cast<double>(tokens);
}

double StepTurns::PromptRowsPerToken() const {
  std::lock_guard lock(mutex_);
  return PromptRowsPerTokenLocked();
}

uint64_t StepTurns::num_rides() const {
  std::lock_guard lock(mutex_);
  return num_rides_;
}

void StepTurns::Turn::End() {
  StepTurns* const turns = std::exchange(turns_, nullptr);
  if (turns == nullptr) return;
  std::lock_guard lock(turns->mutex_);
  const auto now = std::chrono::steady_clock::now();
  turns->taken_ = false;
  ++turns->line(work_).serving;
  turns->last_decoded_ = work_ == Work::kDecoding;
  if (turns->last_decoded_) {
    const std::chrono::nanoseconds took = now - start_;
    turns->step_time_ += (took - turns->step_time_) / (turns->step_time_.count() == 0 ? 1 : 8);
    turns->last_step_ = now;
    ++turns->num_turns_;
  }
  turns->changed_.notify_all();
}

}  // namespace spl::engine
