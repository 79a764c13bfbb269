#include "services/router/dispatcher.h"

#include <algorithm>
#include <random>
#include <utility>

#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/router/generation.h"

namespace spl::router {
namespace {

// 53 bits, so that a JSON reader that holds numbers as doubles can send the seed back unchanged.
uint64_t DrawSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32 | device()) >> 11;
}

}  // namespace

Dispatcher::Dispatcher(boost::asio::io_context& io, DispatchOptions options, const ServedModel& model,
                       const NamespaceKeys& namespace_keys, Metrics& metrics)
    : io_(io),
      options_(std::move(options)),
      model_(model),
      namespace_keys_(namespace_keys),
      metrics_(metrics),
      fleet_(Fleet::Create(io, options_.fleet, calls_, metrics)),
      placement_(options_.placement),
      prefix_index_(options_.prefix_index),
      admission_(options_.admission, metrics) {}

void Dispatcher::Start() {
  fleet_->Start({.on_lost =
                     [this](const std::string& worker_id) {
                       for (const auto& generation : Active()) generation->OnWorkerLost(worker_id);
                     },
                 .on_refresh = [this] { admission_.OnRoom(); }});
}

void Dispatcher::Drain(std::chrono::steady_clock::time_point deadline) {
  admission_.Close();
  std::unique_lock lock(mutex_);
  if (idle_.wait_until(lock, deadline, [&] { return active_.empty(); })) return;
  lock.unlock();
  for (const auto& generation : Active()) {
    generation->Cancel(Errorf(absl::StatusCode::kUnavailable, "the router is shutting down"));
  }
  // Cancelling is posted work; give it the time that freeing pages takes.
  lock.lock();
  idle_.wait_for(lock, std::chrono::seconds(1), [&] { return active_.empty(); });
}

void Dispatcher::Stop() {
  Drain(std::chrono::steady_clock::now());
  fleet_->Stop();
  if (!calls_->CancelAllAndWait(std::chrono::seconds(5))) log::Error("router.calls_left_open");
}

std::shared_ptr<Generation> Dispatcher::Create(GenerationRequest request, std::shared_ptr<GenerationSink> sink) {
  if (request.request_id.empty()) request.request_id = RandomId::Make().ToHex();
  if (!request.sampling.seed.has_value()) request.sampling.seed = DrawSeed();
  request.deadline = std::min(request.deadline, std::chrono::steady_clock::now() + options_.request_timeout);
  std::lock_guard lock(mutex_);
  const uint64_t id = next_id_++;
  auto generation = std::make_shared<Generation>(*this, id, std::move(request), std::move(sink));
  active_.emplace(id, generation);
  return generation;
}

uint32_t Dispatcher::max_context() const {
  const std::shared_ptr<const FleetSnapshot> fleet = fleet_->snapshot();
  return fleet->model.known && fleet->model.max_context > 0 ? fleet->model.max_context : model_.max_context();
}

size_t Dispatcher::num_active() const {
  std::lock_guard lock(mutex_);
  return active_.size();
}

void Dispatcher::OnFinished(uint64_t id) { admission_.Leave(id); }

void Dispatcher::OnDelivered(uint64_t id) {
  std::lock_guard lock(mutex_);
  active_.erase(id);
  if (active_.empty()) idle_.notify_all();
}

std::vector<std::shared_ptr<Generation>> Dispatcher::Active() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Generation>> active;
  for (const auto& [id, weak] : active_) {
    if (auto generation = weak.lock()) active.push_back(std::move(generation));
  }
  return active;
}

}  // namespace spl::router
