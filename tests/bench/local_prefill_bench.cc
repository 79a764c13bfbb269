// The time to the first token of short prompts, computed by a prefill worker or by the decode worker itself: while
// nothing else runs, and while long prompts keep the pool busy; and what the tokens of a running stream wait for it.
// Real programs, one worker of each kind, three routers over them (one that knows the pool only, one that has no pool,
// one that chooses), asked in turn so that all see the same machine.
//
//   build/bench/splice_local_prefill_bench [--prompts 200] [--tokens 64] [--long-tokens 4096]
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cluster/processes.h"

namespace spl::test {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Flags {
  int prompts = 200, tokens = 64, long_tokens = 4096, stream_tokens = 1500;
};

double MillisSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::string Percentiles(std::vector<double> values) {
  if (values.empty()) return "-";
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) { return values[static_cast<size_t>(share * (values.size() - 1) + 0.5)]; };
  return fmt::format("{:.1f} / {:.1f} / {:.1f}", at(0.5), at(0.95), values.back());
}

class Bench {
 public:
  explicit Bench(const Flags& flags) : flags_(flags) {}

  bool Start() {
    ClusterConfig config;
    config.model_dir = "models/splice-tiny";
    config.prefill_uses_store = false;  // every prompt is new: publishing it would only add work
    config.prefill_flags = {"--kv-bytes", "512MiB"};
    config.decode_flags = {"--kv-bytes", "512MiB", "--local-prefill-tokens", "512"};
    config.router_flags = {"--placement", "least-loaded"};  // prefill workers only
    cluster_ = ProcessCluster::Start(config);
    if (cluster_ == nullptr) return false;
    const auto another = [&](const char* flag, const std::string& value) {
      std::vector<std::string> argv = cluster_->router_argv;
      const auto at = std::find(argv.begin(), argv.end(), flag);
      *(at + 1) = value;
      return Process::StartAndWaitReady(argv);
    };
    chooses_ = another("--placement", "splice");
    std::vector<std::string> argv = cluster_->router_argv;
    *(std::find(argv.begin(), argv.end(), "--placement") + 1) = "splice";
    *(std::find(argv.begin(), argv.end(), "--prefill") + 1) = "127.0.0.1:1";
    alone_ = Process::StartAndWaitReady(argv);
    if (chooses_ == nullptr || alone_ == nullptr) return false;
    for (const std::string& http : {Pool(), Choosing(), Local()}) {
      for (int i = 0; i < 400 && HttpGet(http, "/readyz").status != 200; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(25));
      for (int i = 0; i < 5; ++i) (void)Ask(http, flags_.tokens);
    }
    return true;
  }

  const std::string& Pool() const { return cluster_->http(); }
  const std::string& Choosing() const { return chooses_->ready("http"); }
  const std::string& Local() const { return alone_->ready("http"); }

  struct Answer {
    double ttft_ms = 0;
    bool local = false;
  };
  // A prompt that nobody has seen.
  Answer Ask(const std::string& http, int tokens) {
    const HttpReply reply = HttpPost(http, "/v1/completions", Body(tokens, 1, false));
    if (reply.status != 200) {
      fmt::print(stderr, "HTTP {}: {}\n", reply.status, reply.body);
      return {};
    }
    const json receipt = json::parse(reply.body)["splice"];
    return {receipt["seconds"]["ttft"].get<double>() * 1e3, receipt["prefill"] == "local"};
  }

  // In turn, so many of each.
  void Compare(const char* what, const std::vector<std::pair<const char*, std::string>>& routers) {
    std::vector<std::vector<double>> times(routers.size());
    std::vector<int> local(routers.size(), 0);
    for (int i = 0; i < flags_.prompts; ++i) {
      for (size_t r = 0; r < routers.size(); ++r) {
        const Answer answer = Ask(routers[r].second, flags_.tokens);
        times[r].push_back(answer.ttft_ms);
        local[r] += answer.local ? 1 : 0;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    for (size_t r = 0; r < routers.size(); ++r) {
      fmt::print("| {} | {} | {} | {} of {} |\n", what, routers[r].first, Percentiles(times[r]), local[r],
                 flags_.prompts);
      std::fflush(stdout);
    }
  }

  void CompareBusy() {
    std::atomic<bool> stop{false};
    std::atomic<int> done{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        while (!stop) {
          if (HttpPost(Pool(), "/v1/completions", Body(flags_.long_tokens, 1, false)).status == 200) ++done;
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::seconds(1));
    Compare("busy pool", {{"pool", Pool()}, {"router chooses", Choosing()}});
    stop = true;
    for (std::thread& thread : threads) thread.join();
    fmt::print("({} long prompts meanwhile)\n", done.load());
  }

  // Gaps between the tokens of one stream while short prompts come 20 times a second.
  void CompareStream(const char* what, const std::string* http) {
    std::vector<double> gaps, times;
    std::atomic<bool> stop{false};
    std::thread others([&] {
      while (http != nullptr && !stop) {
        const auto next = Clock::now() + std::chrono::milliseconds(50);
        times.push_back(Ask(*http, flags_.tokens).ttft_ms);
        std::this_thread::sleep_until(next);
      }
    });
    {
      SseStream stream(Pool(), "/v1/completions", Body(flags_.tokens, flags_.stream_tokens, true));
      Clock::time_point last;
      for (int i = 0; !stream.Next().empty(); ++i) {
        if (i > 10) gaps.push_back(MillisSince(last));
        last = Clock::now();
      }
    }
    stop = true;
    others.join();
    fmt::print("| {} | {} | {} |\n", what, Percentiles(gaps), Percentiles(times));
    std::fflush(stdout);
  }

 private:
  std::string Body(int tokens, int max_tokens, bool stream) {
    std::vector<int> ids(static_cast<size_t>(tokens));
    {
      std::lock_guard lock(mutex_);
      for (int& id : ids) id = 33 + static_cast<int>(random_() % 90);
    }
    return json{{"model", "splice-tiny"}, {"prompt", ids},      {"max_tokens", max_tokens},
                {"temperature", 0},       {"ignore_eos", true}, {"stream", stream}}
        .dump();
  }

  const Flags flags_;
  std::unique_ptr<ProcessCluster> cluster_;
  std::unique_ptr<Process> chooses_, alone_;
  std::mutex mutex_;  // guards random_
  std::mt19937 random_{1};
};

int Run(const Flags& flags) {
  Bench bench(flags);
  if (!bench.Start()) return 1;
  fmt::print("time to the first token of prompts of {} tokens, ms, p50 / p95 / max\n", flags.tokens);
  fmt::print("| while | computed by | TTFT | local |\n| --- | --- | --- | --- |\n");
  bench.Compare("nothing else runs", {{"pool", bench.Pool()}, {"decode worker", bench.Local()}});
  bench.CompareBusy();
  fmt::print("\ngaps between the tokens of a running stream, ms, p50 / p95 / max; and the TTFT beside it\n");
  fmt::print("| 20 short prompts a second | gaps | TTFT |\n| --- | --- | --- |\n");
  bench.CompareStream("none", nullptr);
  bench.CompareStream("pool", &bench.Pool());
  bench.CompareStream("decode worker", &bench.Local());
  return 0;
}

}  // namespace
}  // namespace spl::test

int main(int argc, char** argv) {
  spl::test::Flags flags;
  CLI::App app("Short prompts computed by the pool and by the decode worker", "splice_local_prefill_bench");
  app.add_option("--prompts", flags.prompts)->capture_default_str();
  app.add_option("--tokens", flags.tokens)->capture_default_str();
  app.add_option("--long-tokens", flags.long_tokens)->capture_default_str();
  app.add_option("--stream-tokens", flags.stream_tokens)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  testing::InitGoogleTest();
  return spl::test::Run(flags);
}
