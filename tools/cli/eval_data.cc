#include "tools/cli/eval_data.h"

#include <lzma.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "services/base/status.h"

namespace spl::cli {
namespace {

using nlohmann::json;

// Small sets unpack to some MB; a file of about this size is no evaluation set.
constexpr size_t kMaxUnpackedBytes = size_t{2} << 30;
constexpr uint64_t kLzmaMemoryLimit = uint64_t{512} << 20;

absl::StatusOr<std::string> Unxz(const std::string& packed, const std::string& path) {
  lzma_stream stream = LZMA_STREAM_INIT;
  if (lzma_stream_decoder(&stream, kLzmaMemoryLimit, LZMA_CONCATENATED) != LZMA_OK)
    return absl::InternalError("lzma: cannot make a decoder");
  std::string out;
  std::vector<char> buffer(1 << 16);
  stream.next_in = reinterpret_cast<const uint8_t*>(packed.data());
  stream.avail_in = packed.size();
  lzma_ret result = LZMA_OK;
  while (result == LZMA_OK && out.size() < kMaxUnpackedBytes) {
    stream.next_out = reinterpret_cast<uint8_t*>(buffer.data());
    stream.avail_out = buffer.size();
    result = lzma_code(&stream, LZMA_FINISH);
    out.append(buffer.data(), buffer.size() - stream.avail_out);
  }
  lzma_end(&stream);
  if (result != LZMA_STREAM_END)
    return InvalidArgument("{}: not a complete .xz file (lzma code {})", path, static_cast<int>(result));
  return out;
}

absl::StatusOr<std::string> StringField(const json& object, const char* field) {
  const auto it = object.find(field);
  if (it == object.end() || !it->is_string()) return InvalidArgument("'{}' is not a string", field);
  return it->get<std::string>();
}

absl::StatusOr<EvalSegment> ParseSegment(const json& value) {
  if (!value.is_object()) return InvalidArgument("'segments' holds something that is no object");
  SPLICE_ASSIGN_OR_RETURN(const std::string type, StringField(value, "type"));
  EvalSegment segment;
  if (type == "answer") {
    segment.kind = EvalSegment::Kind::kAnswer;
    return segment;
  }
  if (type != "new" && type != "reuse") return InvalidArgument("segment type '{}' is not new, reuse or answer", type);
  segment.kind = type == "new" ? EvalSegment::Kind::kNew : EvalSegment::Kind::kReuse;
  SPLICE_ASSIGN_OR_RETURN(segment.text, StringField(value, "text"));
  return segment;
}

// Reads meta.positions, one for each answer, or meta.position for all answers.
absl::Status ParsePositions(const json& root, EvalSample& sample) {
  sample.positions.resize(sample.answers.size());
  const auto meta = root.find("meta");
  if (meta == root.end() || !meta->is_object()) return absl::OkStatus();
  if (const auto one = meta->find("position"); one != meta->end() && one->is_string())
    std::fill(sample.positions.begin(), sample.positions.end(), one->get<std::string>());
  const auto each = meta->find("positions");
  if (each == meta->end()) return absl::OkStatus();
  if (!each->is_array() || each->size() != sample.answers.size() ||
      !std::all_of(each->begin(), each->end(), [](const json& position) { return position.is_string(); }))
    return InvalidArgument("'meta.positions' is not a list of {} texts, one for each answer", sample.answers.size());
  sample.positions = each->get<std::vector<std::string>>();
  return absl::OkStatus();
}

absl::Status ParseAnswers(const json& root, size_t places, EvalSample& sample) {
  if (places == 0) {
    SPLICE_ASSIGN_OR_RETURN(sample.answers.emplace_back(), StringField(root, "answer"));
    return absl::OkStatus();
  }
  const auto answers = root.find("answers");
  if (answers == root.end() || !answers->is_array() || answers->size() != places)
    return InvalidArgument("'answers' is not a list of {} texts, one for each answer segment", places);
  for (const json& answer : *answers) {
    if (!answer.is_string()) return InvalidArgument("'answers' holds something that is no string");
    sample.answers.push_back(answer.get<std::string>());
  }
  return absl::OkStatus();
}

absl::StatusOr<EvalSample> ParseSample(const std::string& line) {
  const json root = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object()) return InvalidArgument("not a JSON object");
  EvalSample sample;
  SPLICE_ASSIGN_OR_RETURN(sample.id, StringField(root, "id"));
  SPLICE_ASSIGN_OR_RETURN(sample.task, StringField(root, "task"));
  sample.length = root.value("length", json(0)).is_number_integer() ? root.value("length", int64_t{0}) : 0;
  if (const auto it = root.find("max_new_tokens"); it != root.end() && it->is_number_integer())
    sample.max_new_tokens = it->get<int64_t>();
  const auto segments = root.find("segments");
  if (segments == root.end() || !segments->is_array()) return InvalidArgument("'segments' is not a list");
  size_t places = 0;
  for (const json& value : *segments) {
    SPLICE_ASSIGN_OR_RETURN(sample.segments.emplace_back(), ParseSegment(value));
    places += sample.segments.back().kind == EvalSegment::Kind::kAnswer;
  }
  SPLICE_RETURN_IF_ERROR(ParseAnswers(root, places, sample));
  SPLICE_RETURN_IF_ERROR(ParsePositions(root, sample));
  return sample;
}

}  // namespace

absl::StatusOr<std::string> ReadMaybeXz(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open", path);
  std::ostringstream text;
  text << in.rdbuf();
  return path.ends_with(".xz") ? Unxz(text.str(), path) : absl::StatusOr<std::string>(text.str());
}

absl::StatusOr<std::vector<EvalSample>> LoadEvalData(const std::string& path) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadMaybeXz(path));
  std::vector<EvalSample> samples;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.empty()) continue;
    auto sample = ParseSample(line);
    if (!sample.ok()) return Annotate(sample.status(), fmt::format("{} line {}", path, number));
    samples.push_back(std::move(*sample));
  }
  return samples;
}

}  // namespace spl::cli
