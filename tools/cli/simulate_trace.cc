#include "tools/cli/simulate_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "services/base/status.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr uint32_t kTokensPerHashId = 512;
constexpr double kDaySeconds = 86'400;

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15ull ^ (b + 0xD1B54A32D192ED03ull);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// splitmix64, because distributions of the standard library differ between implementations.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix(seed, 1)) {}
  uint64_t Next() { return Mix(state_ += 0x9E3779B97F4A7C15ull, 2); }
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }  // [0, 1)
  uint32_t Between(uint32_t low, uint32_t high) { return low + static_cast<uint32_t>(Next() % (high - low + 1)); }
  double Exponential(double mean) { return -mean * std::log1p(-Unit()); }

 private:
  uint64_t state_;
};

// Builds a prompt from pieces. The id of a block depends on all text before it.
class PromptBuilder {
 public:
  void Add(uint64_t text, uint32_t tokens) {
    uint32_t done = 0;
    while (done < tokens) {
      const uint32_t room = kTokensPerHashId - size_ % kTokensPerHashId;
      const uint32_t part = std::min(room, tokens - done);
      hash_ = Mix(hash_, Mix(text, done) + part);
      done += part;
      size_ += part;
      if (size_ % kTokensPerHashId == 0) ids_.push_back(Number(hash_));
    }
  }
  uint32_t size() const { return size_; }
  std::vector<uint64_t> Ids() const {
    std::vector<uint64_t> ids = ids_;
    if (size_ % kTokensPerHashId != 0) ids.push_back(Number(hash_));
    return ids;
  }

 private:
  static uint64_t Number(uint64_t hash) { return hash >> 11; }  // exact in a JSON reader that holds doubles
  uint64_t hash_ = 0;
  uint32_t size_ = 0;
  std::vector<uint64_t> ids_;
};

class Zipf {
 public:
  Zipf(size_t count, double s) {
    double total = 0;
    for (size_t i = 0; i < count; ++i) cumulative_.push_back(total += 1 / std::pow(static_cast<double>(i + 1), s));
  }
  uint32_t Draw(Random& random) const {
    const double x = random.Unit() * cumulative_.back();
    return static_cast<uint32_t>(std::upper_bound(cumulative_.begin(), cumulative_.end(), x) - cumulative_.begin());
  }

 private:
  std::vector<double> cumulative_;
};

std::vector<SimRequest> MakeRag(const SimTraceOptions& options) {
  Random random(options.seed);
  const Zipf popularity(1000, 0.9);
  std::vector<SimRequest> requests;
  double at = 0;
  for (uint32_t i = 0; i < options.num_requests; ++i) {
    at += random.Exponential(1 / options.rate_per_s);
    SimRequest request{.at_s = at, .output_tokens = 128};
    PromptBuilder prompt;
    prompt.Add(Mix(options.seed, 7), 1024);
    std::vector<uint32_t> documents;
    while (documents.size() < 4) {
      const uint32_t document = popularity.Draw(random);
      if (std::find(documents.begin(), documents.end(), document) == documents.end()) documents.push_back(document);
    }
    for (const uint32_t document : documents) {
      const uint32_t begin = prompt.size();
      prompt.Add(1'000'000 + document, 1024);
      request.segments.push_back({.begin = begin, .end = prompt.size(), .id = 1'000'000 + document});
    }
    prompt.Add(random.Next(), 128);
    request.input_tokens = prompt.size();
    request.hash_ids = prompt.Ids();
    requests.push_back(std::move(request));
  }
  return requests;
}

std::vector<SimRequest> MakeHot(const SimTraceOptions& options) {
  Random random(options.seed);
  std::vector<SimRequest> requests;
  double at = 0;
  for (uint32_t i = 0; i < options.num_requests; ++i) {
    at += random.Exponential(1 / options.rate_per_s);
    PromptBuilder prompt;
    prompt.Add(Mix(options.seed, 8), 8192);
    prompt.Add(random.Next(), 256);
    requests.push_back({.at_s = at, .input_tokens = prompt.size(), .output_tokens = 64, .hash_ids = prompt.Ids()});
  }
  return requests;
}

// Rate relative to the mean; highest at 14:00.
double DayFactor(double at_s) { return 1 + 0.75 * std::sin(2 * std::numbers::pi * (at_s / kDaySeconds - 8.0 / 24)); }

std::vector<SimRequest> MakeChat(const SimTraceOptions& options, bool day) {
  constexpr double kMeanTurns = 6.5, kMeanAnswerSeconds = 5;
  Random random(options.seed);
  std::vector<SimRequest> requests;
  double start = 0;
  while (requests.size() < options.num_requests) {
    // Thinning: makes arrivals at the highest rate, and keeps the day's share of them.
    start += random.Exponential(kMeanTurns / options.rate_per_s / (day ? 1.75 : 1));
    if (day && random.Unit() * 1.75 > DayFactor(start)) continue;
    PromptBuilder prompt;
    prompt.Add(100 + random.Next() % 4, 2048);
    double at = start;
    const uint32_t turns = random.Between(1, 12);
    for (uint32_t turn = 0; turn < turns; ++turn) {
      prompt.Add(random.Next(), random.Between(128, 640));
      const uint32_t answer = random.Between(128, 512);
      requests.push_back(
          {.at_s = at, .input_tokens = prompt.size(), .output_tokens = answer, .hash_ids = prompt.Ids()});
      prompt.Add(random.Next(), answer);
      at += kMeanAnswerSeconds + random.Exponential(20);
    }
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [](const SimRequest& a, const SimRequest& b) { return a.at_s < b.at_s; });
  requests.resize(options.num_requests);
  return requests;
}

uint32_t LengthOf(const json& line, const char* name, const char* other) {
  for (const char* key : {name, other}) {
    const auto it = line.find(key);
    if (it != line.end() && it->is_number_unsigned()) return it->get<uint32_t>();
  }
  return 0;
}

absl::StatusOr<SimRequest> ParseLine(const json& line) {
  if (!line.is_object()) return InvalidArgument("not a JSON object");
  SimRequest request{.input_tokens = LengthOf(line, "input_length", "input_tokens"),
                     .output_tokens = std::max(1u, LengthOf(line, "output_length", "output_tokens"))};
  if (request.input_tokens == 0) return InvalidArgument("no \"input_length\"; a simulation needs lengths, not texts");
  const auto at = line.find("timestamp");
  if (at != line.end() && at->is_number()) request.at_s = at->get<double>() / 1e3;
  if (line.contains("hash_ids") && line["hash_ids"].is_array()) {
    for (const json& id : line["hash_ids"]) {
      if (!id.is_number_integer()) return InvalidArgument("\"hash_ids\" holds something else than integers");
      request.hash_ids.push_back(id.get<uint64_t>());
    }
  }
  if (line.contains("segments") && line["segments"].is_array()) {
    for (const json& s : line["segments"]) {
      const bool good = s.is_array() && s.size() == 3 && s[0].is_number_unsigned() && s[1].is_number_unsigned() &&
                        s[2].is_number_unsigned();
      const uint32_t last = request.segments.empty() ? 0 : request.segments.back().end;
      if (!good || s[0].get<uint32_t>() < last || s[1].get<uint32_t>() <= s[0].get<uint32_t>() ||
          s[1].get<uint32_t>() > request.input_tokens) {
        return InvalidArgument("\"segments\" must be ascending, disjoint [begin, end, id] within the prompt");
      }
      request.segments.push_back({s[0].get<uint32_t>(), s[1].get<uint32_t>(), s[2].get<uint64_t>()});
    }
  }
  if (line.contains("tenant") && line["tenant"].is_string()) request.tenant = line["tenant"].get<std::string>();
  if (line.contains("priority") && line["priority"].is_number_integer()) request.priority = line["priority"].get<int>();
  return request;
}

}  // namespace

absl::StatusOr<std::vector<SimRequest>> ReadSimTrace(const std::string& path, double rate_per_s,
                                                     uint32_t max_requests) {
  std::ifstream file(path);
  if (!file) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open", path);
  std::vector<SimRequest> requests;
  std::string text;
  for (uint64_t number = 1; std::getline(file, text); ++number) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (max_requests > 0 && requests.size() >= max_requests) break;
    absl::StatusOr<SimRequest> request = ParseLine(json::parse(text, nullptr, false));
    if (!request.ok()) return InvalidArgument("{}:{}: {}", path, number, MessageOf(request.status()));
    requests.push_back(*std::move(request));
  }
  if (requests.empty()) return InvalidArgument("{}: holds no request", path);
  std::stable_sort(requests.begin(), requests.end(),
                   [](const SimRequest& a, const SimRequest& b) { return a.at_s < b.at_s; });
  const double first = requests.front().at_s, span = requests.back().at_s - first;
  if (rate_per_s > 0 && span <= 0) return InvalidArgument("{}: a rate needs timestamps that differ", path);
  const double scale = rate_per_s > 0 ? static_cast<double>(requests.size()) / rate_per_s / span : 1;
  for (SimRequest& request : requests) request.at_s = (request.at_s - first) * scale;
  return requests;
}

std::string TraceText(const std::vector<SimRequest>& requests) {
  std::string text;
  for (const SimRequest& r : requests) {
    json line = {{"timestamp", r.at_s * 1e3},
                 {"input_length", r.input_tokens},
                 {"output_length", r.output_tokens},
                 {"hash_ids", r.hash_ids}};
    for (const SimSegment& s : r.segments) line["segments"].push_back({s.begin, s.end, s.id});
    if (!r.tenant.empty()) line["tenant"] = r.tenant;
    if (r.priority != 0) line["priority"] = r.priority;
    text += line.dump() + "\n";
  }
  return text;
}

absl::StatusOr<std::vector<SimRequest>> MakeSimTrace(const std::string& kind, const SimTraceOptions& options) {
  if (kind == "rag") return MakeRag(options);
  if (kind == "chat") return MakeChat(options, false);
  if (kind == "day") return MakeChat(options, true);
  if (kind == "hot") return MakeHot(options);
  return InvalidArgument("\"{}\" is none of the traces rag, chat, hot, day", kind);
}

}  // namespace spl::cli
