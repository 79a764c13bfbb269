#include "services/engine/runtime/token_delivery.h"

#include <iterator>
#include <utility>

namespace spl::engine {

void TokenDelivery::Events::Clear() {
  events.clear();
  tokens.clear();
}

void TokenDelivery::Events::Append(Events& others) {
  events.insert(events.end(), std::make_move_iterator(others.events.begin()),
                std::make_move_iterator(others.events.end()));
  tokens.insert(tokens.end(), std::make_move_iterator(others.tokens.begin()),
                std::make_move_iterator(others.tokens.end()));
}

TokenDelivery::TokenDelivery(size_t max_undelivered)
    : max_undelivered_(max_undelivered), thread_([this] { RunLoop(); }) {}

TokenDelivery::~TokenDelivery() { Stop(); }

void TokenDelivery::AddToken(DecodeListener& to, DecodeToken token) {
  filling_.tokens.push_back(std::move(token));
  if (!filling_.events.empty() && filling_.events.back().to == &to) {
    if (auto* const num_tokens = std::get_if<size_t>(&filling_.events.back().what); num_tokens != nullptr) {
      ++*num_tokens;
      return;
    }
  }
  filling_.events.push_back({&to, size_t{1}});
}

void TokenDelivery::AddEnd(std::unique_ptr<DecodeListener> of, const absl::Status& status) {
  DecodeListener* const to = of.get();
  filling_.events.push_back({to, End{std::move(of), status}});
}

void TokenDelivery::Flush() {
  if (filling_.events.empty()) return;
  {
    std::lock_guard lock(mutex_);
    undelivered_ += filling_.size();
    if (handed_.events.empty())
      std::swap(handed_, filling_);
    else
      handed_.Append(filling_);
  }
  handed_over_.notify_one();
  filling_.Clear();
}

void TokenDelivery::WaitUntilAtMost(size_t undelivered) {
  std::unique_lock lock(mutex_);
  delivered_.wait(lock, [&] { return undelivered_ <= undelivered; });
}

void TokenDelivery::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    handed_over_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void TokenDelivery::RunLoop() {
  std::unique_lock lock(mutex_);
  while (true) {
    handed_over_.wait(lock, [&] { return stopping_ || !handed_.events.empty(); });
    if (handed_.events.empty()) return;
    std::swap(handed_, delivering_);
    const size_t num = delivering_.size();
    lock.unlock();
    Deliver(delivering_);
    delivering_.Clear();
    lock.lock();
    undelivered_ -= num;
    delivered_.notify_one();
  }
}

void TokenDelivery::Deliver(Events& events) {
  std::span<const DecodeToken> tokens = events.tokens;
  for (Event& event : events.events) {
    if (const auto* const num_tokens = std::get_if<size_t>(&event.what); num_tokens != nullptr) {
      event.to->on_tokens(tokens.first(*num_tokens));
      tokens = tokens.subspan(*num_tokens);
    } else {
      const std::unique_ptr<DecodeListener> last = std::move(std::get<End>(event.what).owner);
      last->on_done(std::get<End>(event.what).status);
    }
  }
}

}  // namespace spl::engine
