#include "tools/cli/conversation_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <random>

#include "services/base/ids.h"
#include "services/base/status.h"
#include "tools/cli/eval_plot.h"

namespace spl::cli {
namespace {

constexpr char kAlone[] = "alone";

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// The user's texts of one conversation: the first one, and the addition of each later turn.
std::vector<std::vector<int32_t>> DrawTexts(const ConversationOptions& options, int32_t conversation) {
  std::mt19937_64 random(options.seed * 1000 + static_cast<uint64_t>(conversation));
  std::vector<std::vector<int32_t>> texts;
  for (int32_t turn = 0; turn < options.turns; ++turn) {
    auto& text = texts.emplace_back(static_cast<size_t>(turn == 0 ? options.first_tokens : options.turn_tokens));
    for (int32_t& id : text) id = options.alphabet[random() % options.alphabet.size()];
  }
  return texts;
}

// Runs the turns of one conversation and adds them to `samples`.
absl::Status Converse(TextGenerator& generator, const ConversationOptions& options, const std::string& method,
                      int32_t conversation, std::map<int32_t, std::vector<ConversationTurn>>& samples,
                      const std::function<void(int32_t)>& progress) {
  const bool alone = method == kAlone;
  const size_t slash = method.find('/');
  const std::string session = RandomId::Make().ToHex();
  TextRequest request{.max_tokens = options.answer_tokens, .ignore_eos = true};
  request.reuse = alone ? "exact" : method.substr(0, slash);
  if (slash != std::string::npos) request.decode = method.substr(slash + 1);
  const auto texts = DrawTexts(options, conversation);
  for (int32_t turn = 0; turn < options.turns && !options.stopped(); ++turn) {
    if (progress) progress(turn + 1);
    const auto& text = texts[static_cast<size_t>(turn)];
    request.ids.insert(request.ids.end(), text.begin(), text.end());
    // A namespace of its own, so that no other text is hit; for "alone" a new one each turn, so that not even the last
    // turn's is.
    request.reuse_options = {{"namespace", alone ? fmt::format("{}-{}", session, turn) : session}};
    if (alone)
      request.reuse_options["publish"] = false;
    else
      request.reuse_options["session"] = session;
    SPLICE_ASSIGN_OR_RETURN(const TextResult result, generator.Generate(request, [](const auto&) { return true; }));
    const nlohmann::json nothing = nlohmann::json::object();
    const nlohmann::json& receipt = result.receipt.is_object() ? result.receipt : nothing;
    const nlohmann::json tokens = receipt.value("tokens", nothing), bytes = receipt.value("bytes", nothing);
    samples[turn].push_back({.method = method,
                             .turn = turn + 1,
                             .prompt_tokens = result.prompt_tokens,
                             .cached_tokens = result.cached_tokens,
                             .computed_tokens = tokens.value("computed", int64_t{0}),
                             .held_tokens = tokens.value("held", int64_t{0}),
                             .moved_bytes = bytes.value("moved", int64_t{0}),
                             .ttft_s = result.ttft_s,
                             .tokens_per_s = result.tokens_per_s()});
    SPLICE_ASSIGN_OR_RETURN(const auto answer, generator.Tokenize(result.text));
    request.ids.insert(request.ids.end(), answer.begin(), answer.end());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<ConversationTurn>> MeasureConversations(
    TextGenerator& generator, const ConversationOptions& options,
    const std::function<void(const std::string& method, int32_t conversation, int32_t turn)>& progress) {
  if (options.alphabet.empty()) return InvalidArgument("conversations need token ids to draw texts from");
  std::vector<std::string> methods = options.methods;
  methods.insert(methods.begin(), kAlone);
  std::vector<ConversationTurn> turns;
  for (const std::string& method : methods) {
    std::map<int32_t, std::vector<ConversationTurn>> samples;
    for (int32_t c = 0; c < options.conversations && !options.stopped(); ++c) {
      SPLICE_RETURN_IF_ERROR(Converse(generator, options, method, c, samples, [&](int32_t turn) {
        if (progress) progress(method, c + 1, turn);
      }));
    }
    for (auto& [number, of_turn] : samples) {
      ConversationTurn& turn = turns.emplace_back(of_turn[0]);
      std::vector<double> ttft, rate;
      for (const ConversationTurn& t : of_turn) {
        ttft.push_back(t.ttft_s);
        rate.push_back(t.tokens_per_s);
      }
      turn.ttft_s = Median(std::move(ttft));
      turn.tokens_per_s = Median(std::move(rate));
    }
  }
  return turns;
}

std::string ConversationText(const std::vector<ConversationTurn>& turns) {
  std::string out = fmt::format("{:<20} {:>5} {:>8} {:>8} {:>9} {:>10} {:>9} {:>8} {:>9}\n", "method", "turn", "prompt",
                                "cached", "computed", "TTFT (ms)", "tokens/s", "held", "sent (MB)");
  for (const ConversationTurn& t : turns)
    out += fmt::format("{:<20} {:>5} {:>8} {:>8} {:>9} {:>10.1f} {:>9.1f} {:>8} {:>9.2f}\n", t.method, t.turn,
                       t.prompt_tokens, t.cached_tokens, t.computed_tokens, t.ttft_s * 1e3, t.tokens_per_s,
                       t.held_tokens, static_cast<double>(t.moved_bytes) * 1e-6);
  return out;
}

nlohmann::ordered_json ConversationJson(const std::vector<ConversationTurn>& turns,
                                        const ConversationOptions& options) {
  nlohmann::ordered_json out;
  out["config"] = {{"turns", options.turns},
                   {"first_tokens", options.first_tokens},
                   {"turn_tokens", options.turn_tokens},
                   {"answer_tokens", options.answer_tokens},
                   {"conversations", options.conversations},
                   {"seed", options.seed}};
  out["turns"] = nlohmann::ordered_json::array();
  for (const ConversationTurn& t : turns)
    out["turns"].push_back({{"method", t.method},
                            {"turn", t.turn},
                            {"prompt_tokens", t.prompt_tokens},
                            {"cached_tokens", t.cached_tokens},
                            {"computed_tokens", t.computed_tokens},
                            {"held_tokens", t.held_tokens},
                            {"moved_bytes", t.moved_bytes},
                            {"ttft_s", t.ttft_s},
                            {"tokens_per_s", t.tokens_per_s}});
  return out;
}

std::string ConversationPage(const std::vector<ConversationTurn>& turns) {
  std::vector<PlotSeries> series;
  double longest = 0;
  int32_t last = 1;
  for (const ConversationTurn& t : turns) {
    if (series.empty() || series.back().label != t.method)
      series.push_back({.label = t.method, .dots = {}, .line = {}});
    const PlotDot dot{static_cast<double>(t.turn), t.ttft_s * 1e3, 4};
    series.back().dots.push_back(dot);
    series.back().line.push_back(dot);
    longest = std::max(longest, t.ttft_s * 1e3);
    last = std::max(last, t.turn);
  }
  return "<!doctype html><meta charset='utf-8'><title>splice bench --turns</title>"
         "<style>body{font-family:sans-serif;margin:2em}pre{background:#f6f6f6;padding:1em}</style>" +
         ScatterPlot("Time to the first token, turn by turn (ms)",
                     {.label = "turn", .unit = "", .max = static_cast<double>(last), .num_ticks = last},
                     {.label = "TTFT", .unit = "", .max = std::max(longest * 1.05, 1.0)}, series) +
         "<pre>" + EscapeHtml(ConversationText(turns)) + "</pre>\n";
}

}  // namespace spl::cli
