// Measures what a push costs the prompt that it belongs to, on one GPU: prompts through the model with nobody to send
// to, and with a push of their KV to another pool of the same GPU beside them, in turns.
//
//   pass   from the first slice to the argmax behind the last one
//   tail   from there until the last page is written and the checksums are back: what the second token waits for
//   calls  the push thread's time in PageSender::Send, a prompt
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <deque>
#include <numeric>
#include <thread>

#include "services/base/bounded_queue.h"
#include "services/base/status.h"
#include "services/engine/engine.h"
#include "services/engine/model/random_weights.h"
#include "services/prefill_work/page_sender.h"
#include "services/worker_flags/worker_flags.h"
#include "tests/bench/median.h"
#include "tests/bench/page_push.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;
using SharedFence = std::shared_ptr<const kernels::Fence>;

struct Flags {
  std::string shape = "llama-3.1-8b";
  std::string device = "cuda:0";
  std::string kv_dtype = "auto";
  std::vector<int32_t> tokens = {2048, 32768};
  int32_t slice = 4096;
  // In one Send, with one fence; 0: nothing is pushed, but a fence is recorded for each layer; -1: nor that.
  std::vector<int32_t> layers = {-1, 0, 1, 8};
  int32_t repeats = 5;
};

double Seconds(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A layer of a slice whose kernels have been launched.
struct Launched {
  int32_t layer = 0;
  engine::PageRange pages;
  SharedFence fence;
};

// The thread that gives layers to the sender, some at once.
class Pusher {
 public:
  Pusher(prefill::PageSender& sender, const engine::SequenceKv& from, const engine::SequenceKv& to, int32_t at_once)
      : sender_(sender), from_(from), to_(to), at_once_(at_once), thread_([this] { Loop(); }) {}
  void Add(Launched launched) { (void)queue_.TryPush(std::move(launched)); }
  // Sends the rest, and waits until everything is written.
  absl::Status Finish() {
    queue_.Close();
    thread_.join();
    sender_.Finish();
    return status_;
  }
  double seconds_in_calls() const { return seconds_; }

 private:
  void Loop() {
    std::vector<Launched> some;
    while (true) {
      std::optional<Launched> launched = queue_.Pop(std::chrono::milliseconds(100));
      if (launched) some.push_back(*std::move(launched));
      const bool over = !launched && queue_.closed();
      if (static_cast<int32_t>(some.size()) >= at_once_ || (over && !some.empty())) Send(some);
      if (over) return;
    }
  }
  void Send(std::vector<Launched>& some) {
    std::vector<int32_t> local;
    std::vector<uint32_t> remote;
    std::vector<SharedFence> behind;
    for (const Launched& launched : some) {
      behind.push_back(launched.fence);
      for (int32_t head = 0; head < from_.shape().num_kv_heads; ++head) {
        const auto mine = from_.stream(launched.layer, head), theirs = to_.stream(launched.layer, head);
        for (int32_t page = launched.pages.begin; page < launched.pages.end; ++page) {
          local.push_back(mine[static_cast<size_t>(page)]);
          remote.push_back(static_cast<uint32_t>(theirs[static_cast<size_t>(page)]));
        }
      }
    }
    some.clear();
    crcs_.emplace_back(local.size());
    const auto start = Clock::now();
    const absl::Status sent =
        sender_.Send(from_.pool(), {.local = local, .remote = remote, .behind = behind}, crcs_.back().data(),
                     start + std::chrono::minutes(1), [this](const absl::Status& status) { status_.Update(status); });
    seconds_ += Seconds(start);
    status_.Update(sent);
  }

  prefill::PageSender& sender_;
  const engine::SequenceKv& from_;
  const engine::SequenceKv& to_;
  const int32_t at_once_;
  BoundedQueue<Launched> queue_{1 << 16};
  std::deque<std::vector<uint32_t>> crcs_;
  absl::Status status_;
  double seconds_ = 0;
  std::thread thread_;
};

struct Times {
  std::vector<double> pass, tail, calls;
};

absl::Status RunPrompt(engine::ParallelExecutor& executor, engine::SequenceKv& kv, const engine::SequenceKv& to,
                       const prefill::RemotePool& remote, int32_t at_once, const Flags& flags, Times& times) {
  const engine::ModelConfig& c = executor.model().config();
  const int32_t length = to.num_pages_per_stream() * kernels::kPageTokens;
  std::vector<int32_t> prompt(length), positions(length);
  for (int32_t i = 0; i < length; ++i) prompt[i] = static_cast<int32_t>((i * 7919ll) % c.vocab_size);
  std::iota(positions.begin(), positions.end(), 0);
  engine::ExactPolicy policy(c);
  kv.set_num_tokens(0);
  const auto sender = prefill::MakeDeviceSender(remote);
  std::optional<Pusher> pusher;
  if (at_once > 0) pusher.emplace(*sender, kv, to, at_once);
  const auto start = Clock::now();
  for (int32_t done = 0; done < length;) {
    const int32_t rows = std::min(flags.slice, length - done);
    const engine::PrefillSlice slice{std::span(prompt).subspan(done, rows), std::span(positions).subspan(done, rows),
                                     &kv, &policy};
    const engine::PageRange pages{done / kernels::kPageTokens, (done + rows) / kernels::kPageTokens};
    SPLICE_RETURN_IF_ERROR(executor.Prefill({&slice, 1}, [&](int32_t layer) {
      const bool fenced = at_once == 0 || (at_once > 0 && ((layer + 1) % at_once == 0 || layer + 1 == c.num_layers));
      const SharedFence fence = fenced ? executor.RecordFence() : nullptr;
      if (pusher) pusher->Add({layer, pages, fence});
      return true;
    }));
    done += rows;
    kv.set_num_tokens(done);
  }
  const int32_t last = (length - 1) % flags.slice;
  SPLICE_RETURN_IF_ERROR(executor.ComputeLogits({&last, 1}));
  SPLICE_RETURN_IF_ERROR(executor.Argmax().status());
  times.pass.push_back(Seconds(start));
  const auto computed = Clock::now();
  if (pusher) SPLICE_RETURN_IF_ERROR(pusher->Finish());
  times.tail.push_back(Seconds(computed));
  times.calls.push_back(pusher ? pusher->seconds_in_calls() : 0);
  return absl::OkStatus();
}

absl::Status RunBench(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::RandomModel random, engine::ParseRandomModel(flags.shape));
  SPLICE_ASSIGN_OR_RETURN(const engine::Devices devices, MakeDevices(flags.device, 1));
  SPLICE_ASSIGN_OR_RETURN(const auto kv_dtype, KvTypeFromName(flags.kv_dtype));
  SPLICE_ASSIGN_OR_RETURN(const std::shared_ptr<const engine::Model> model,
                          engine::Model::LoadRandom(random, devices, {.kv_dtype = kv_dtype}));
  const engine::ModelConfig& c = model->config();
  const int64_t pages = engine::PagesForTokens(c, *std::max_element(flags.tokens.begin(), flags.tokens.end()));
  SPLICE_ASSIGN_OR_RETURN(const engine::KvMemory mine, engine::AllocateKvMemory(*model, pages));
  SPLICE_ASSIGN_OR_RETURN(const engine::KvMemory theirs, engine::AllocateKvMemory(*model, pages));
  engine::PagePool from(mine.pages, model->backends()), to(theirs.pages, model->backends());
  SPLICE_ASSIGN_OR_RETURN(const std::string handle, model->backend().Export(*theirs.buffers[0]));
  prefill::RemotePool remote{.pages_per_part = static_cast<uint32_t>(to.num_pages())};
  SPLICE_ASSIGN_OR_RETURN(remote.parts.emplace_back().emplace_back(), model->backend().Import(handle));
  SPLICE_ASSIGN_OR_RETURN(const auto executor, engine::ParallelExecutor::Create(
                                                   model, mine.pages, {.max_rows = flags.slice, .max_sequences = 1}));
  for (const int32_t length : flags.tokens) {
    engine::SequenceKv kv(from, engine::KvShapeOf(c)), target(to, engine::KvShapeOf(c));
    SPLICE_RETURN_IF_ERROR(kv.Reserve(length));
    SPLICE_RETURN_IF_ERROR(target.Reserve(length));
    std::vector<Times> times(flags.layers.size());
    for (int i = 0; i <= flags.repeats; ++i) {
      if (i == 1) times.assign(flags.layers.size(), {});  // the first one warms up
      for (size_t way = 0; way < flags.layers.size(); ++way)
        SPLICE_RETURN_IF_ERROR(RunPrompt(*executor, kv, target, remote, flags.layers[way], flags, times[way]));
    }
    SPLICE_RETURN_IF_ERROR(ExpectEqualPages(from, kv.AllPages(), to, target.AllPages()));
    const double bytes = static_cast<double>(kv.AllPages().size() * model->page_bytes());
    for (size_t way = 0; way < flags.layers.size(); ++way) {
      const double pass = Median(times[way].pass);
      fmt::print(
          "prompt of {:>6} in slices of {}, {:>2} layers at once: pass {:8.2f} ms ({:+.2f} %), tail {:.3f} ms, "
          "calls {:.3f} ms; {:.2f} GB\n",
          length, flags.slice, flags.layers[way], pass * 1e3, 100 * (pass / Median(times[0].pass) - 1),
          Median(times[way].tail) * 1e3, Median(times[way].calls) * 1e3, bytes / 1e9);
    }
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::Flags flags;
  CLI::App app("Times prompts on one GPU with and without a push of their KV beside them.");
  app.add_option("--random-weights", flags.shape, "SHAPE or config.json, with :SEED")->capture_default_str();
  app.add_option("--device", flags.device)->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, "K and V in auto, f32, bf16 or fp8")->capture_default_str();
  app.add_option("--tokens", flags.tokens, "multiples of 64")->delimiter(',')->capture_default_str();
  app.add_option("--slice-tokens", flags.slice, "a multiple of 64")->capture_default_str();
  app.add_option("--layers", flags.layers, "that are sent at once; 0: nothing is sent, -1: and no fences are recorded")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--repeats", flags.repeats)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = spl::RunBench(flags);
  if (status.ok()) return 0;
  fmt::print(stderr, "splice_kv_push_bench: {}\n", spl::MessageOf(status));
  return 1;
}
