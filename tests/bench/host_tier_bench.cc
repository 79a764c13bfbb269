// How many long conversations one device decodes: dense with as many as fit, and sparcas with their KV in host memory
// (docs/decisions/0019-host-tier.md). In process: a model of a real shape with random weights and random K and V, or a
// model from a folder that reads a text.
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <sstream>

#include "services/base/byte_size_option.h"
#include "services/base/status.h"
#include "services/engine/cache/hot_buffer.h"
#include "services/engine/engine.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/model/random_weights.h"
#include "services/engine/recovery/exact.h"
#include "services/tokenizer/tokenizer.h"
#include "services/worker_flags/worker_flags.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::kPageTokens;

struct Flags {
  std::string shape = "llama-3.1-8b";
  std::string model;
  std::string text;
  bool same_tokens = false;
  std::string backend = "cuda";
  std::string kv_dtype = "auto";
  uint64_t kv_bytes = 100ull << 30;
  uint64_t host_bytes = 0;
  uint64_t host_physical_bytes = 0;
  std::vector<int32_t> sequences = {28, 56, 70, 84};
  int32_t context = 32768;
  int32_t dense = -1;
  int32_t budget = 2048;
  int32_t hot_tokens = 4096;
  int32_t refresh_interval = 1 << 20;
  int32_t steps = 48;
  int32_t kv_exponent = -6;
};

constexpr int32_t kWarmUp = 8;
constexpr int32_t kSlice = 512;

double Seconds(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Host memory of any size over `physical` bytes: each page of it stands for many. What sequences write there is mixed
// up, which takes as long to read.
class RepeatedMemory final : public kernels::Buffer {
 public:
  static absl::StatusOr<std::unique_ptr<kernels::Buffer>> Map(size_t bytes, size_t physical) {
    constexpr size_t kUnit = 2 << 20;
    bytes = (bytes + kUnit - 1) / kUnit * kUnit;
    physical = std::min(bytes, (physical + kUnit - 1) / kUnit * kUnit);
    const int file = memfd_create("host_tier_bench", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(physical)) != 0)
      return absl::ResourceExhaustedError("no memory file");
    void* const base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return absl::ResourceExhaustedError("no addresses for host memory");
    for (size_t at = 0; at < bytes; at += physical) {
      if (mmap(static_cast<std::byte*>(base) + at, std::min(physical, bytes - at), PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
        return absl::ResourceExhaustedError("no memory for a part of the host's");
    }
    close(file);
    return std::unique_ptr<kernels::Buffer>(new RepeatedMemory(base, bytes));
  }
  ~RepeatedMemory() override { munmap(base_, bytes_); }
  void* data() const override { return base_; }
  size_t size() const override { return bytes_; }

 private:
  RepeatedMemory(void* base, size_t bytes) : base_(base), bytes_(bytes) {}
  void* const base_;
  const size_t bytes_;
};

// Sequences that decode together.
struct Batch {
  engine::ParallelExecutor& executor;
  engine::PagePool& pool;
  const engine::Model& model;
  std::vector<std::unique_ptr<engine::SequenceKv>> kv;
  std::vector<std::unique_ptr<engine::TokenSelector>> selectors;
  std::vector<std::unique_ptr<engine::CompactPages>> compact;
  std::vector<std::unique_ptr<engine::HotBuffer>> hot;
  std::vector<int32_t> last;
  std::span<const int32_t> text = {};  // prompts are parts of it; empty: K and V are what the pool has
  bool same_tokens = false;            // each step of a sequence reads the same token

  // One more sequence, with room for `positions` more.
  absl::Status Add(const engine::DecodeOptions& options, int32_t context, int32_t positions) {
    const engine::ModelConfig& config = model.config();
    kv.push_back(std::make_unique<engine::SequenceKv>(pool, engine::KvShapeOf(config)));
    SPLICE_RETURN_IF_ERROR(kv.back()->Reserve(context + positions));
    last.push_back(static_cast<int32_t>(kv.size() * 7919 % static_cast<size_t>(config.vocab_size)));
    if (!text.empty()) SPLICE_RETURN_IF_ERROR(Prefill(context));
    kv.back()->set_num_tokens(context);
    SPLICE_ASSIGN_OR_RETURN(selectors.emplace_back(),
                            engine::MakeTokenSelector(engine::WithKeys(options, model), config, nullptr));
    SPLICE_ASSIGN_OR_RETURN(compact.emplace_back(), engine::MakeCompactPages(*selectors.back(), model, pool, context));
    if (compact.back() != nullptr) SPLICE_RETURN_IF_ERROR(compact.back()->Reserve(context + positions));
    hot.emplace_back();
    return absl::OkStatus();
  }
  // The last sequence's prompt, from another place of the text than the others'.
  absl::Status Prefill(int32_t context) {
    const size_t places = text.size() - static_cast<size_t>(context);
    const auto prompt = text.subspan(places == 0 ? 0 : kv.size() * 7919 % places, static_cast<size_t>(context));
    std::vector<int32_t> positions(prompt.size());
    std::iota(positions.begin(), positions.end(), 0);
    engine::ExactPolicy policy(model.config());
    for (int32_t done = 0; done < context; done += kSlice) {
      const auto rows = static_cast<size_t>(std::min(kSlice, context - done));
      const engine::PrefillSlice slice{prompt.subspan(static_cast<size_t>(done), rows),
                                       std::span(positions).subspan(static_cast<size_t>(done), rows), kv.back().get(),
                                       &policy};
      SPLICE_RETURN_IF_ERROR(executor.Prefill({&slice, 1}));
      kv.back()->set_num_tokens(done + static_cast<int64_t>(rows));
    }
    last.back() = prompt.back();
    return absl::OkStatus();
  }
  // A step of sequences [begin, end).
  absl::Status Step(size_t begin, size_t end) {
    std::vector<engine::DecodeRow> rows;
    for (size_t i = begin; i < end; ++i)
      rows.push_back({.token = last[i],
                      .kv = kv[i].get(),
                      .selector = selectors[i].get(),
                      .compact = compact[i].get(),
                      .hot = hot[i].get()});
    SPLICE_RETURN_IF_ERROR(executor.Decode(rows));
    SPLICE_ASSIGN_OR_RETURN(const auto best, executor.Argmax());
    for (size_t i = begin; i < end; ++i) {
      if (!same_tokens) last[i] = best[i - begin];
      kv[i]->set_num_tokens(kv[i]->num_tokens() + 1);
    }
    return absl::OkStatus();
  }
  // Moves the full pages of the last sequence, layer by layer.
  absl::Status MoveLast(engine::HostKv& host, const Flags& flags, int32_t positions) {
    const engine::ModelConfig& config = model.config();
    const engine::TokenSelector& selector = *selectors.back();
    if (selector.scoring().scoring != engine::TokenScoring::kPackedKeys)
      return absl::FailedPreconditionError("keys are not packed on this device");
    SPLICE_ASSIGN_OR_RETURN(
        hot.back(), engine::HotBuffer::Create(pool, host, engine::KvShapeOf(config),
                                              {.num_slots = flags.hot_tokens, .max_tokens = flags.context + positions},
                                              model.backends()));
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      std::vector<int32_t> streams;
      for (int32_t h = 0; h < config.num_kv_heads; ++h) {
        if (selector.Chooses(layer, h)) streams.push_back(layer * config.num_kv_heads + h);
      }
      if (!streams.empty())
        SPLICE_RETURN_IF_ERROR(hot.back()->Move(*kv.back(), streams, (flags.context - kPageTokens) / kPageTokens));
    }
    return absl::OkStatus();
  }
  absl::Status ReadCounts() {
    for (const auto& of_sequence : hot) {
      if (of_sequence != nullptr) SPLICE_RETURN_IF_ERROR(of_sequence->ReadCounts());
    }
    return absl::OkStatus();
  }
};

struct Times {
  double mean = 0, fastest = 0;
};

absl::StatusOr<Times> TimeSteps(Batch& batch, int32_t steps) {
  for (int32_t i = 0; i < kWarmUp; ++i) SPLICE_RETURN_IF_ERROR(batch.Step(0, batch.kv.size()));
  std::vector<double> times;
  for (int32_t i = 0; i < steps; ++i) {
    const auto start = Clock::now();
    SPLICE_RETURN_IF_ERROR(batch.Step(0, batch.kv.size()));
    times.push_back(Seconds(start));
  }
  return Times{std::accumulate(times.begin(), times.end(), 0.0) / steps, *std::min_element(times.begin(), times.end())};
}

void Print(const char* what, size_t sequences, const Times& times, const std::string& rest) {
  fmt::print(
      "{:<22} {:>4} sequences: {:8.3f} ms a step (mean), fastest {:8.3f}, {:7.2f} tokens/s a sequence, {:8.0f} "
      "together{}\n",
      what, sequences, times.mean * 1e3, times.fastest * 1e3, 1 / times.mean,
      static_cast<double>(sequences) / times.mean, rest);
  std::fflush(stdout);
}

// As many as fit, without a host tier.
absl::Status TimeOnDevice(engine::ParallelExecutor& executor, engine::PagePool& pool, const engine::Model& model,
                          const Flags& flags, std::span<const int32_t> text, const engine::DecodeOptions& options,
                          size_t most) {
  Batch batch{.executor = executor, .pool = pool, .model = model, .text = text, .same_tokens = flags.same_tokens};
  const int32_t positions = flags.steps + kWarmUp + 2;
  while (batch.kv.size() < most) {
    const absl::Status added = batch.Add(options, flags.context, positions);
    if (added.ok()) continue;
    const size_t complete = batch.hot.size();
    batch.kv.resize(complete);
    batch.selectors.resize(complete);
    batch.compact.resize(complete);
    batch.last.resize(complete);
    if (added.code() == absl::StatusCode::kResourceExhausted) break;
    return added;
  }
  if (batch.kv.empty()) return absl::ResourceExhaustedError("--kv-bytes: there is no room for a single sequence");
  SPLICE_ASSIGN_OR_RETURN(const Times times, TimeSteps(batch, flags.steps));
  Print(options.selector.c_str(), batch.kv.size(), times, "");
  return absl::OkStatus();
}

absl::Status TimeHostTier(engine::ParallelExecutor& executor, engine::PagePool& pool, const engine::Model& model,
                          const Flags& flags, std::span<const int32_t> text, engine::HostKv& host,
                          const engine::DecodeOptions& options) {
  Batch batch{.executor = executor, .pool = pool, .model = model, .text = text, .same_tokens = flags.same_tokens};
  const int32_t positions = static_cast<int32_t>(flags.sequences.size()) * (flags.steps + kWarmUp) + 2;
  for (const int32_t sequences : flags.sequences) {
    const auto start = Clock::now();
    double moving = 0;
    const size_t before = batch.kv.size();
    while (batch.kv.size() < static_cast<size_t>(sequences)) {
      SPLICE_RETURN_IF_ERROR(batch.Add(options, flags.context, positions));
      SPLICE_RETURN_IF_ERROR(batch.Step(batch.kv.size() - 1, batch.kv.size()));
      const auto move_start = Clock::now();
      SPLICE_RETURN_IF_ERROR(batch.MoveLast(host, flags, positions));
      moving += Seconds(move_start);
    }
    const double added = Seconds(start);
    SPLICE_RETURN_IF_ERROR(batch.ReadCounts());
    const engine::HostKv::Counts first = host.counts();
    SPLICE_ASSIGN_OR_RETURN(const Times times, TimeSteps(batch, flags.steps));
    SPLICE_RETURN_IF_ERROR(batch.ReadCounts());
    const engine::HostKv::Counts now = host.counts();
    const double listed = static_cast<double>(now.listed - first.listed),
                 copied = static_cast<double>(now.copied - first.copied);
    const double row_bytes = static_cast<double>(model.page_bytes()) / kPageTokens;
    Print(
        "sparcas, host tier", batch.kv.size(), times,
        fmt::format("\n  hit rate {:.2f} %, {:.2f} MB a step over the link; {:.2f} GiB of the pool a sequence, {:.1f} "
                    "GiB on the host; {} joined in {:.1f} s, of which {:.1f} s moved pages",
                    100 * (1 - copied / std::max(listed, 1.0)), copied * row_bytes / (flags.steps + kWarmUp) / 1e6,
                    static_cast<double>(pool.num_pages() - pool.num_free()) * static_cast<double>(model.page_bytes()) /
                        static_cast<double>(sequences) / (1 << 30),
                    static_cast<double>(host.used_bytes()) / (1 << 30), batch.kv.size() - before, added, moving));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const engine::Model>> LoadModel(const Flags& flags, const engine::Devices& devices) {
  SPLICE_ASSIGN_OR_RETURN(const auto kv_dtype, KvTypeFromName(flags.kv_dtype));
  if (!flags.model.empty()) return engine::Model::Load(flags.model, devices, {.kv_dtype = kv_dtype});
  SPLICE_ASSIGN_OR_RETURN(const engine::RandomModel random, engine::ParseRandomModel(flags.shape));
  return engine::Model::LoadRandom(random, devices, {.kv_dtype = kv_dtype});
}

// Tokens of --text; empty without.
absl::StatusOr<std::vector<int32_t>> ReadText(const Flags& flags) {
  if (flags.text.empty()) return std::vector<int32_t>();
  std::ifstream file(flags.text);
  std::stringstream text;
  text << file.rdbuf();
  if (!file.good() || flags.model.empty())
    return absl::InvalidArgumentError("--text: it cannot be read, or there is no --model to read it");
  SPLICE_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::Load(flags.model));
  SPLICE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, tokenizer->Encode(text.str(), {}));
  if (tokens.size() < static_cast<size_t>(flags.context))
    return absl::InvalidArgumentError(fmt::format("--text: {} tokens, less than --context", tokens.size()));
  return tokens;
}

absl::Status RunBench(Flags flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::Devices devices, MakeDevices(flags.backend, 1));
  SPLICE_ASSIGN_OR_RETURN(const auto model, LoadModel(flags, devices));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> text, ReadText(flags));
  const engine::ModelConfig& c = model->config();
  fmt::print("{}\nmodel {}, context {}, budget {}, hot buffer {}, refresh interval {}, pool {:.1f} GiB\n",
             devices[0]->description(), c.name, flags.context, flags.budget, flags.hot_tokens, flags.refresh_interval,
             static_cast<double>(flags.kv_bytes) / (1 << 30));
  SPLICE_ASSIGN_OR_RETURN(const engine::KvMemory memory,
                          engine::AllocateKvMemory(*model, static_cast<int64_t>(flags.kv_bytes / model->page_bytes())));
  SPLICE_RETURN_IF_ERROR(engine::FillWithNoise(*model, memory, flags.kv_exponent));
  engine::PagePool pool(memory.pages, model->backends());
  std::sort(flags.sequences.begin(), flags.sequences.end());
  const int32_t most = flags.sequences.empty() ? 1 : flags.sequences.back();
  SPLICE_ASSIGN_OR_RETURN(const auto executor,
                          engine::ParallelExecutor::Create(model, memory.pages,
                                                           {.max_rows = std::max({most, 64, text.empty() ? 0 : kSlice}),
                                                            .max_sequences = std::max(most, 64)}));
  engine::DecodeOptions sparcas("sparcas");
  sparcas.budget = flags.budget;
  sparcas.refresh_interval = flags.refresh_interval;
  sparcas.packed_keys = true;
  const size_t on_device = flags.dense < 0 ? 64 : static_cast<size_t>(flags.dense);
  if (on_device > 0) {
    SPLICE_RETURN_IF_ERROR(
        TimeOnDevice(*executor, pool, *model, flags, text, engine::DecodeOptions("dense"), on_device));
    SPLICE_RETURN_IF_ERROR(TimeOnDevice(*executor, pool, *model, flags, text, sparcas, on_device));
  }
  if (flags.sequences.empty()) return absl::OkStatus();
  const auto needed = static_cast<uint64_t>(engine::PagesForTokens(c, flags.context)) * model->page_bytes() *
                      static_cast<uint64_t>(most);
  const uint64_t bytes = flags.host_bytes > 0 ? flags.host_bytes : needed;
  const auto start = Clock::now();
  SPLICE_ASSIGN_OR_RETURN(
      auto mapped, RepeatedMemory::Map(bytes, flags.host_physical_bytes > 0 ? flags.host_physical_bytes : bytes));
  SPLICE_ASSIGN_OR_RETURN(const auto host, engine::HostKv::Over(*model, std::move(mapped)));
  fmt::print("{:.1f} GiB of host memory{}, page-locked in {:.1f} s\n", static_cast<double>(bytes) / (1 << 30),
             flags.host_physical_bytes > 0 && flags.host_physical_bytes < bytes
                 ? fmt::format(" over {:.1f} GiB", static_cast<double>(flags.host_physical_bytes) / (1 << 30))
                 : "",
             Seconds(start));
  return TimeHostTier(*executor, pool, *model, flags, text, *host, sparcas);
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::Flags flags;
  CLI::App app("Times decode steps of long sequences whose KV is in host memory, beside those that fit on the device.");
  app.add_option("--random-weights", flags.shape, "SHAPE or config.json, with :SEED")->capture_default_str();
  app.add_option("--model", flags.model, "folder of a model, instead");
  app.add_option("--text", flags.text, "with --model: a file, parts of which are the prompts");
  app.add_flag("--same-tokens", flags.same_tokens,
               "steps read the same token again, so that their queries resemble each other as those of text do; "
               "otherwise the most likely one");
  app.add_option("--backend", flags.backend, "cpu, cuda or cuda:GPU")->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, "K and V in auto, f32, bf16 or fp8")->capture_default_str();
  spl::AddByteSizeOption(app, "--kv-bytes", flags.kv_bytes, "size of the page pool on the device");
  spl::AddByteSizeOption(app, "--host-bytes", flags.host_bytes, "host memory for KV; 0: enough for all");
  spl::AddByteSizeOption(app, "--host-physical-bytes", flags.host_physical_bytes,
                         "less than that, mapped again and again: for machines with less host memory; 0: all of it");
  app.add_option("--sequences", flags.sequences, "numbers of sequences with host tier")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--dense", flags.dense, "most sequences without; -1: as many as fit, 64 at most; 0: none")
      ->capture_default_str();
  app.add_option("--context", flags.context, "tokens of every sequence")->capture_default_str();
  app.add_option("--budget", flags.budget)->capture_default_str();
  app.add_option("--hot-tokens", flags.hot_tokens, "slots of a hot buffer, a multiple of 64")->capture_default_str();
  app.add_option("--refresh-interval", flags.refresh_interval, "steps between two choices of dimensions")
      ->capture_default_str();
  app.add_option("--steps", flags.steps)->capture_default_str();
  app.add_option("--kv-exponent", flags.kv_exponent, "size of random K and V, a power of two")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::erase(flags.sequences, 0);
  const absl::Status status = spl::RunBench(flags);
  if (status.ok()) return 0;
  fmt::print(stderr, "splice_host_tier_bench: {}\n", spl::MessageOf(status));
  return 1;
}
