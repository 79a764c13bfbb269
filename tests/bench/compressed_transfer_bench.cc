// End-to-end time of a prompt's KV from host memory to host memory, whole and without what local heads do not keep,
// over shared memory as it is and behind lines of given rates: checksums and writes here, flush, checksums there. What
// is sent is what the product would decide with the way's measured costs; --always leaves out whatever it costs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "services/base/status.h"
#include "services/decode/leave_out.h"
#include "services/engine/engine.h"
#include "services/engine/model/random_weights.h"
#include "services/transport/bandwidth.h"
#include "services/transport/kv_transport.h"
#include "tests/bench/median.h"
#include "tests/bench/page_push.h"
#include "tests/support/shaped_channel.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kTimeout{60};
constexpr size_t kScratchBytes = 1 << 20;  // of the self-test, as a worker has it

struct Flags {
  std::string shape = "llama-3.1-8b";
  std::vector<int32_t> tokens = {256, 1024, 4096, 8192, 16384, 32768};
  std::vector<std::string> classes = {"safe", "mid", "paper"};
  std::vector<double> gbits = {25, 100, 0};
  int32_t slice = 4096;
  int32_t repeats = 5;
  bool always = false;
};

// A pool in `memory`, with one sequence.
struct Side {
  std::unique_ptr<engine::PagePool> pool;
  std::unique_ptr<engine::SequenceKv> kv;
};

absl::StatusOr<Side> MakeSide(std::byte* memory, size_t bytes, const engine::ModelConfig& c, int32_t tokens,
                              std::shared_ptr<const engine::StreamClasses> classes) {
  kernels::KvPoolView view{.base = memory, .dtype = kernels::DType::kBF16, .head_dim = c.head_dim};
  view.num_pages = static_cast<int32_t>(bytes / view.page_bytes());
  Side side{.pool = std::make_unique<engine::PagePool>(view)};
  side.kv = std::make_unique<engine::SequenceKv>(*side.pool, engine::KvShapeOf(c), std::move(classes));
  SPLICE_RETURN_IF_ERROR(side.kv->Reserve(tokens));
  return side;
}

// Seconds of one transfer: sent, flushed, and its checksums compared where it arrived.
absl::StatusOr<double> Transfer(transport::KvChannel& channel, const Side& from, const Side& to, int32_t slice) {
  const auto start = Clock::now();
  const auto sender = prefill::MakeHostSender(channel, false);
  SPLICE_RETURN_IF_ERROR(PushPages(*sender, *from.kv, *to.kv, slice, [&] { return channel.FlushAndWait(kTimeout); }));
  const std::vector<int32_t> landed = to.kv->AllPages();
  std::vector<uint32_t> crcs(landed.size());
  SPLICE_RETURN_IF_ERROR(to.pool->ChecksumPages(landed, crcs.data()));
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The pages of `from` that `to` keeps.
std::vector<int32_t> Kept(const engine::SequenceKv& from, const engine::SequenceKv& to) {
  std::vector<int32_t> kept;
  for (size_t s = 0; s < to.streams().size(); ++s) {
    for (size_t page = 0; page < to.streams()[s].size(); ++page) {
      if (to.streams()[s][page] != kernels::kNoPage) kept.push_back(from.streams()[s][page]);
    }
  }
  return kept;
}

absl::Status Run(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::RandomModel random, engine::ParseRandomModel(flags.shape));
  const engine::ModelConfig& c = random.config;
  const size_t page_bytes = kernels::KvPoolView{.dtype = kernels::DType::kBF16, .head_dim = c.head_dim}.page_bytes();
  const int32_t longest = *std::max_element(flags.tokens.begin(), flags.tokens.end());
  const size_t bytes = static_cast<size_t>(engine::PagesForTokens(c, longest)) * page_bytes;
  transport::TransportOptions options;
  options.carriers = "shm";
  SPLICE_ASSIGN_OR_RETURN(const auto reader, transport::KvTransport::Create(options));
  SPLICE_ASSIGN_OR_RETURN(const auto writer, transport::KvTransport::Create(options));
  SPLICE_ASSIGN_OR_RETURN(auto landing, reader->Allocate(bytes + kScratchBytes));
  SPLICE_ASSIGN_OR_RETURN(auto source, writer->Allocate(bytes));
  auto* const words = reinterpret_cast<uint64_t*>(source->data());
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) words[i] = i * 0x9e3779b97f4a7c15ull;
  const transport::RemoteMemory remote{reader->listen_address(), landing->packed_rkey(),
                                       reinterpret_cast<uint64_t>(landing->data()), landing->size(),
                                       transport::HostId()};
  SPLICE_ASSIGN_OR_RETURN(const auto plain, writer->Connect(remote, kTimeout));
  nlohmann::json out = {{"shape", c.name}, {"rows", nlohmann::json::array()}};
  fmt::print("{}, slices of {} tokens; seconds from the first write to compared checksums, median of {}\n", c.name,
             flags.slice, flags.repeats);
  for (const double gbit : flags.gbits) {
    std::unique_ptr<ShapedChannel> shaped;
    if (gbit > 0) shaped = std::make_unique<ShapedChannel>(*plain, gbit * 1e9 / 8);
    transport::KvChannel& channel = shaped != nullptr ? static_cast<transport::KvChannel&>(*shaped) : *plain;
    SPLICE_ASSIGN_OR_RETURN(const transport::WriteCost way,
                            transport::MeasureWriteCost(channel, bytes, kScratchBytes, kTimeout));
    fmt::print("\n{}: {:.2f} GB/s, {:.2f} us a write\n{:>7} {:>6} {:>9} {:>9} {:>9} {:>7} {:>7}\n",
               gbit > 0 ? fmt::format("{} Gbit/s", gbit) : std::string("shared memory as it is"), way.bytes_per_s / 1e9,
               way.write_s * 1e6, "tokens", "map", "MB", "dense ms", "ms", "ratio", "bytes");
    for (const int32_t tokens : flags.tokens) {
      SPLICE_ASSIGN_OR_RETURN(const Side from, MakeSide(source->data(), bytes, c, tokens, nullptr));
      for (const std::string& preset : flags.classes) {
        SPLICE_ASSIGN_OR_RETURN(const engine::HeadPreset settings, engine::FindHeadPreset(preset));
        const auto map = engine::HeadClassMap::Spread(c.num_layers, c.num_kv_heads, settings);
        auto classes = engine::ServedClasses(map);
        const bool leaves_out = flags.always || decode::LeavingOutPays(*classes, tokens, page_bytes, way);
        std::vector<double> seconds[2];
        int64_t pages[2] = {};
        // In turns, so that what else the machine does meets both.
        for (int round = 0; round <= flags.repeats; ++round) {
          for (const bool compressed : {false, true}) {
            SPLICE_ASSIGN_OR_RETURN(const Side to, MakeSide(landing->data(), bytes, c, tokens,
                                                            compressed && leaves_out ? classes : nullptr));
            SPLICE_ASSIGN_OR_RETURN(const double took, Transfer(channel, from, to, flags.slice));
            if (round > 0) seconds[compressed].push_back(took);
            pages[compressed] = to.kv->num_pages();
            if (round == 0)
              SPLICE_RETURN_IF_ERROR(ExpectEqualPages(*from.pool, Kept(*from.kv, *to.kv), *to.pool, to.kv->AllPages()));
          }
        }
        const double dense = Median(seconds[0]), less = Median(seconds[1]);
        fmt::print("{:>7} {:>6} {:>9.1f} {:>9.2f} {:>9.2f} {:>7.3f} {:>7.3f}{}\n", tokens, preset,
                   static_cast<double>(pages[1]) * static_cast<double>(page_bytes) / 1e6, dense * 1e3, less * 1e3,
                   less / dense, static_cast<double>(pages[1]) / static_cast<double>(pages[0]),
                   leaves_out ? "" : "  (sent whole)");
        std::fflush(stdout);
        out["rows"].push_back({{"gbit_per_s", gbit},
                               {"tokens", tokens},
                               {"map", preset},
                               {"dense_seconds", dense},
                               {"seconds", less},
                               {"pages", pages[1]},
                               {"dense_pages", pages[0]},
                               {"left_out", leaves_out}});
      }
    }
  }
  SPLICE_RETURN_IF_ERROR(plain->Close(kTimeout));
  source.reset();
  writer->Stop();
  landing.reset();
  reader->Stop();
  fmt::print("\n{}\n", out.dump());
  return absl::OkStatus();
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::Flags flags;
  CLI::App app("Times the transfer of a prompt's KV with head classes against the whole of it.");
  app.add_option("--random-weights", flags.shape, "SHAPE or config.json")->capture_default_str();
  app.add_option("--tokens", flags.tokens)->delimiter(',')->capture_default_str();
  app.add_option("--head-classes", flags.classes, "safe, mid, paper")->delimiter(',')->capture_default_str();
  app.add_option("--gbits", flags.gbits, "rates of the line; 0: as fast as it goes")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--slice-tokens", flags.slice, "tokens that are sent at once")->capture_default_str();
  app.add_option("--repeats", flags.repeats)->capture_default_str();
  app.add_flag("--always", flags.always, "leave out even where it does not pay");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = spl::Run(flags);
  if (status.ok()) return 0;
  fmt::print(stderr, "splice_compressed_transfer_bench: {}\n", spl::MessageOf(status));
  return 1;
}
