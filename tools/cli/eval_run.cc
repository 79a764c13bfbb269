#include "tools/cli/eval_run.h"

#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/escaping.h"
#include "services/base/status.h"

namespace spl::cli {
namespace {

using nlohmann::json;

// Logits behind the prompt. Empty: the server gave none.
absl::StatusOr<std::vector<float>> FirstLogits(const TextResult& result) {
  if (!result.receipt.is_object() || !result.receipt.contains("first_logits")) return std::vector<float>();
  std::string bytes;
  if (!absl::Base64Unescape(result.receipt["first_logits"].get<std::string>(), &bytes) ||
      bytes.size() % sizeof(float) != 0)
    return Errorf(absl::StatusCode::kDataLoss, "the receipt's first_logits are not base64 of 32-bit floats");
  std::vector<float> logits(bytes.size() / sizeof(float));
  std::memcpy(logits.data(), bytes.data(), bytes.size());
  return logits;
}

bool IgnoreText(const std::string&) { return true; }

}  // namespace

EvalRun::EvalRun(TextGenerator& generator, EvalRunOptions options)
    : generator_(generator), options_(std::move(options)), report_(options_.groupings) {
  if (!options_.answers_file.empty()) answers_.open(options_.answers_file, std::ios::trunc);
  std::random_device random;
  nonce_ = fmt::format("{:08x}{:08x}", random(), random());
}

absl::Status EvalRun::Run(const EvalSample& sample, const EvalMethod& method, const EvalSample* other) {
  session_ = fmt::format("eval-{}-{}", nonce_, num_namespaces_++);
  other_.clear();
  if (other != nullptr && method.provenance == Provenance::kForeign) {
    std::string text;
    for (const EvalSegment& segment : other->segments) {
      if (segment.kind == EvalSegment::Kind::kReuse) text += segment.text;
    }
    SPLICE_ASSIGN_OR_RETURN(other_, generator_.Tokenize(text));
  }
  PromptParts parts;
  size_t place = 0;
  int64_t num_tokens = 0, history_tokens = 0;
  for (const EvalSegment& segment : sample.segments) {
    std::string text = segment.text;
    const bool is_answer = segment.kind == EvalSegment::Kind::kAnswer;
    if (is_answer) {
      SPLICE_ASSIGN_OR_RETURN(const std::string answer, Ask(sample, place, history_tokens, parts, method));
      text = (options_.history == EvalHistory::kGenerated ? answer : sample.answers[place]) + "<|im_end|>";
      ++place;
    }
    SPLICE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, generator_.Tokenize(text));
    num_tokens += static_cast<int64_t>(ids.size());
    if (is_answer) history_tokens = num_tokens;
    parts.push_back({std::move(ids), segment.kind == EvalSegment::Kind::kReuse});
  }
  return place == 0 ? Ask(sample, 0, 0, parts, method).status() : absl::OkStatus();
}

void EvalRun::Append(TextRequest& request, const Part& part) {
  const auto begin = static_cast<int64_t>(request.ids.size());
  request.ids.insert(request.ids.end(), part.ids.begin(), part.ids.end());
  if (part.reusable && !part.ids.empty()) request.segments.push_back({begin, static_cast<int64_t>(request.ids.size())});
}

TextRequest EvalRun::NewRequest(const std::string& namespace_name) const {
  TextRequest request;
  request.segment_namespace = namespace_name;
  request.reuse_options = {{"namespace", namespace_name + "-prefix"}};
  return request;
}

std::vector<TextRequest> EvalRun::AloneRequests(const PromptParts& parts, const std::string& namespace_name) const {
  std::vector<TextRequest> requests;
  for (const Part& part : parts) {
    if (part.reusable && !part.ids.empty()) Append(requests.emplace_back(NewRequest(namespace_name)), part);
  }
  return requests;
}

// The same segments in the same order, behind half of the instructions, so that positions and context differ.
TextRequest EvalRun::TogetherRequest(const PromptParts& parts, const std::string& namespace_name) const {
  TextRequest request = NewRequest(namespace_name);
  size_t last = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].reusable) last = i;
  }
  for (size_t i = 0; i <= last; ++i) {
    Part part = parts[i];
    if (i == 0 && !part.reusable) part.ids.resize((part.ids.size() + 1) / 2);
    Append(request, part);
  }
  return request;
}

// Each segment at its place behind the same instructions, with other text between them: positions tell nothing.
std::vector<TextRequest> EvalRun::ForeignRequests(const PromptParts& parts, const std::string& namespace_name) const {
  std::vector<TextRequest> requests;
  Part front = parts.front().reusable ? Part() : parts.front();
  for (size_t i = front.ids.empty() ? 0 : 1, filled = 0; i < parts.size(); ++i) {
    if (parts[i].reusable && !parts[i].ids.empty()) {
      TextRequest& request = requests.emplace_back(NewRequest(namespace_name));
      Append(request, front);
      Append(request, parts[i]);
    }
    for (size_t n = parts[i].ids.size(); n > 0; --n) front.ids.push_back(other_[filled++ % other_.size()]);
  }
  return requests;
}

absl::Status EvalRun::WarmUp(const PromptParts& parts, const EvalMethod& method, const std::string& namespace_name) {
  std::vector<TextRequest> requests;
  switch (method.provenance) {
    case Provenance::kContext:
      requests.push_back(TogetherRequest(parts, namespace_name));
      break;
    case Provenance::kIsolated:
      requests = AloneRequests(parts, namespace_name);
      break;
    case Provenance::kForeign:
      if (other_.empty())
        return InvalidArgument(
            "--provenance foreign puts the text of another sample of the task and length in front of the segments: "
            "give a set, or a --limit, of two samples or more");
      requests = ForeignRequests(parts, namespace_name);
      break;
  }
  for (TextRequest& request : requests) {
    if (request.ids.empty()) continue;
    request.max_tokens = 1;
    request.reuse = "exact";
    SPLICE_RETURN_IF_ERROR(generator_.Generate(request, IgnoreText).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> EvalRun::Ask(const EvalSample& sample, size_t place, int64_t history_tokens,
                                         const PromptParts& parts, const EvalMethod& method) {
  const bool in_session = options_.keep_history_kv && !method.reuses_segments();
  const std::string namespace_name = in_session ? session_ : fmt::format("eval-{}-{}", nonce_, num_namespaces_++);
  TextRequest request = NewRequest(namespace_name);
  if (method.reuses_segments()) {
    if (const absl::Status warm = WarmUp(parts, method, namespace_name); !warm.ok())
      return Annotate(warm, "warm-up of sample " + sample.id);
  }
  for (const Part& part : parts) Append(request, part);
  if (!method.reuses_segments()) request.segments.clear();
  request.max_tokens = sample.max_new_tokens;
  request.reuse = method.reuse;
  request.decode = method.decode;
  request.reuse_options.update(OptionsFor(method, sample.length));
  request.reuse_options["publish"] = in_session;
  if (in_session) request.reuse_options["session"] = session_;  // keeps approximate KV, too
  request.reuse_options["return_first_logits"] = true;
  auto result = generator_.Generate(request, IgnoreText);
  if (!result.ok()) return Annotate(result.status(), "sample " + sample.id);
  const bool correct = result->text == sample.answers[place];
  const EvalPlace where{.id = sample.id,
                        .task = sample.task,
                        .length = sample.length,
                        .turn = static_cast<int64_t>(place) + 1,
                        .num_turns = static_cast<int64_t>(sample.answers.size()),
                        .position = sample.positions[place],
                        .history_tokens = history_tokens};
  report_.Add(where, method, *result, correct);
  SPLICE_RETURN_IF_ERROR(CompareFirstLogits(where, method, *result));
  if (answers_.is_open())
    answers_ << json{{"id", sample.id},
                     {"place", place},
                     {"reuse", method.label},
                     {"provenance", ProvenanceName(method.provenance)},
                     {"decode", method.decode_label},
                     {"text", result->text},
                     {"correct", correct}}
                    .dump()
             << '\n';
  return std::move(result->text);
}

// Compares with the logits of `exact` for the same prompt, if `exact` ran.
absl::Status EvalRun::CompareFirstLogits(const EvalPlace& place, const EvalMethod& method, const TextResult& result) {
  if (options_.history == EvalHistory::kGenerated && place.turn > 1) return absl::OkStatus();  // prompts may differ
  SPLICE_ASSIGN_OR_RETURN(std::vector<float> logits, FirstLogits(result));
  if (!method.reuses_segments()) {
    exact_logits_[{place.id, place.turn}] = std::move(logits);
    return absl::OkStatus();
  }
  const auto exact = exact_logits_.find({place.id, place.turn});
  if (exact == exact_logits_.end() || logits.empty() || logits.size() != exact->second.size()) return absl::OkStatus();
  report_.AddFirstLogits(place, method, logits, exact->second);
  return absl::OkStatus();
}

}  // namespace spl::cli
