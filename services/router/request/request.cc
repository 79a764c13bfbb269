#include "services/router/request/request.h"

#include <algorithm>

#include "services/methods/quality.h"
#include "services/router/request/api_error.h"
#include "services/wire/request_options.h"

namespace spl::router {
namespace {

// NaN fails every comparison and so is refused too.
absl::Status CheckRange(const char* field, double value, double low, double high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return ParamError(field, "must be between {} and {}, got {}", low, high, value);
}

absl::Status ValidateSampling(const Sampling& s) {
  if (s.max_tokens.has_value() && *s.max_tokens == 0) return ParamError("max_tokens", "must be at least 1, got 0");
  if (s.max_tokens.has_value() && s.min_tokens > *s.max_tokens) {
    return ParamError("min_tokens", "is {} but max_tokens is {}", s.min_tokens, *s.max_tokens);
  }
  SPLICE_RETURN_IF_ERROR(CheckRange("temperature", s.temperature, 0, 2));
  SPLICE_RETURN_IF_ERROR(CheckRange("top_p", s.top_p, 0, 1));
  if (s.top_p == 0.0F) return ParamError("top_p", "must be greater than 0");
  SPLICE_RETURN_IF_ERROR(CheckRange("min_p", s.min_p, 0, 1));
  SPLICE_RETURN_IF_ERROR(CheckRange("repetition_penalty", s.repetition_penalty, 0.01, 10));
  SPLICE_RETURN_IF_ERROR(CheckRange("presence_penalty", s.presence_penalty, -2, 2));
  SPLICE_RETURN_IF_ERROR(CheckRange("frequency_penalty", s.frequency_penalty, -2, 2));
  if (s.n == 0 || s.n > kMaxContinuations) {
    return ParamError("n", "must be between 1 and {}, got {}", kMaxContinuations, s.n);
  }
  if (s.logprobs.has_value() && *s.logprobs > kMaxTopLogprobs) {
    return ParamError("logprobs", "at most {} per token are served, got {}", kMaxTopLogprobs, *s.logprobs);
  }
  if (s.stop_token_ids.size() > kMaxStopTokenIds) {
    return ParamError("stop_token_ids", "at most {} are served, got {}", kMaxStopTokenIds, s.stop_token_ids.size());
  }
  if (s.logit_bias.size() > kMaxLogitBias) {
    return ParamError("logit_bias", "at most {} entries are served, got {}", kMaxLogitBias, s.logit_bias.size());
  }
  if (s.structured_output.has_value() && s.ignore_eos)
    return ParamError("ignore_eos", "does not go with {}: the answer ends where it is complete", s.structured_field);
  for (const auto& [id, bias] : s.logit_bias) SPLICE_RETURN_IF_ERROR(CheckRange("logit_bias", bias, -100, 100));
  return absl::OkStatus();
}

absl::Status ValidateStop(const std::vector<std::string>& stop) {
  if (stop.size() > kMaxStopStrings) {
    return ParamError("stop", "at most {} strings are served, got {}", kMaxStopStrings, stop.size());
  }
  for (const std::string& s : stop) {
    if (s.empty()) return ParamError("stop", "must not hold an empty string");
    if (s.size() > kMaxStopBytes) {
      return ParamError("stop", "a stop string may have {} bytes at most, got {}", kMaxStopBytes, s.size());
    }
  }
  return absl::OkStatus();
}

absl::Status CheckName(const char* field, const std::string& name) {
  if (name.size() <= kMaxNameBytes) return absl::OkStatus();
  return ParamError(field, "may have {} bytes at most, got {}", kMaxNameBytes, name.size());
}

absl::Status ValidateReuse(const GenerationRequest& request) {
  const v1::ReuseOptions& reuse = request.reuse;
  if (!methods::IsAuto(reuse.policy()) && methods::FindPolicy(reuse.policy()) == nullptr) {
    return ParamError("splice.reuse", "\"{}\" is not served by this build; it has {}, {}", reuse.policy(),
                      methods::kAuto, methods::PolicyNames());
  }
  if (!methods::IsAuto(reuse.decode()) && methods::FindSelector(reuse.decode()) == nullptr) {
    return ParamError("splice.decode", "\"{}\" is not served by this build; it has {}, {}", reuse.decode(),
                      methods::kAuto, methods::SelectorNames());
  }
  if (!methods::ParseQuality(reuse.quality()).has_value()) {
    return ParamError("splice.quality",
                      "must be \"strict\", \"balanced\" or a number above 0 and at most 1, got \"{}\"",
                      reuse.quality());
  }
  for (const wire::RequestOption& option : wire::RequestOptions()) {
    if (option.field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_DOUBLE || !option.IsSet(reuse)) continue;
    const google::protobuf::Message& in = option.In(reuse);
    const std::string name = "splice." + option.name();
    SPLICE_RETURN_IF_ERROR(CheckRange(name.c_str(), in.GetReflection()->GetDouble(in, option.field), 0, 1));
  }
  if (const wire::UnreadOption unread = wire::FindUnreadOption(reuse); unread.option != nullptr) {
    return ParamError("splice." + unread.option->name(), "is an option of {} {}, and {} does not read it",
                      unread.option->of_decoding ? "decode" : "reuse", fmt::join(unread.option->methods, ", "),
                      unread.method);
  }
  return CheckName("splice.namespace", request.namespace_name);
}

// Of prompts whose segments are marks or ranges; the number and the names.
absl::Status ValidateSegments(const Prompt& prompt, std::string_view reuse) {
  size_t count = 0;
  std::vector<const std::string*> names;
  const auto marks = [&](const SegmentMarks& segments) {
    count = segments.size();
    for (size_t i = 0; i < count; ++i) {
      names.push_back(&segments[i].namespace_name);
      names.push_back(&segments[i].knowledge_base);
      names.push_back(&segments[i].document);
    }
  };
  if (const auto* chat = std::get_if<ChatPrompt>(&prompt)) marks(chat->segments);
  if (const auto* text = std::get_if<SegmentedText>(&prompt)) marks(text->segments);
  if (const auto* tokens = std::get_if<TokenizedPrompt>(&prompt)) {
    count = tokens->segments.size();
    uint32_t end = 0;
    for (const TokenSegment& segment : tokens->segments) {
      names.push_back(&segment.namespace_name);
      names.push_back(&segment.knowledge_base);
      if (segment.begin < end || segment.end <= segment.begin || segment.end > tokens->ids.size()) {
        return ParamError("splice.segments", "[{}, {}) must be ascending, disjoint and inside the prompt of {} tokens",
                          segment.begin, segment.end, tokens->ids.size());
      }
      end = segment.end;
    }
  }
  if (count > kMaxSegments) return ParamError("splice.segments", "at most {} are served, got {}", kMaxSegments, count);
  const methods::Policy* const policy = methods::FindPolicy(reuse);
  if (policy != nullptr && count > policy->max_segments) {
    return ParamError("splice.segments", "reuse {} serves at most {}, got {}", reuse, policy->max_segments, count);
  }
  for (const std::string* name : names) SPLICE_RETURN_IF_ERROR(CheckName("a name in a segment", *name));
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSource(const PromptSegment& segment, bool has_text) {
  const auto field = [&](const char* name) { return segment.field.empty() ? name : segment.field + "." + name; };
  if (!segment.knowledge_base.empty() && !segment.namespace_name.empty()) {
    return ParamError(field("namespace"), "and knowledge_base exclude each other");
  }
  if (!segment.document.empty() && segment.knowledge_base.empty()) {
    return ParamError(field("document"), "needs the knowledge_base that it is in");
  }
  if (!segment.document.empty() && has_text) return ParamError(field("document"), "and text exclude each other");
  if (segment.document.empty() && !has_text) return ParamError(field("text"), "is required");
  return absl::OkStatus();
}

absl::Status ValidateRequest(const GenerationRequest& request) {
  if (request.priority < -kMaxPriority || request.priority > kMaxPriority) {
    return ParamError("priority", "must be between {} and {}, got {}", -kMaxPriority, kMaxPriority, request.priority);
  }
  if (request.request_id.size() > kMaxNameBytes) {
    return ParamError("request_id", "may have {} bytes at most, got {}", kMaxNameBytes, request.request_id.size());
  }
  if (request.session.size() > kMaxNameBytes)
    return ParamError("session", "may have {} bytes at most, got {}", kMaxNameBytes, request.session.size());
  SPLICE_RETURN_IF_ERROR(ValidateSampling(request.sampling));
  // An echo's number is that of `logprobs`, which has been checked.
  if (request.prompt_logprobs.value_or(0) > kMaxTopLogprobs)
    return ParamError("prompt_logprobs", "at most {} per token are served, got {}", kMaxTopLogprobs,
                      *request.prompt_logprobs);
  SPLICE_RETURN_IF_ERROR(ValidateStop(request.stop));
  SPLICE_RETURN_IF_ERROR(ValidateSegments(request.prompt, request.reuse.policy()));
  return ValidateReuse(request);
}

void AskPromptLogprobs(std::optional<uint32_t> num_top, GenerationRequest& request) {
  request.prompt_logprobs = num_top;
  if (request.echo && request.sampling.logprobs.has_value())
    request.prompt_logprobs = std::max(*request.sampling.logprobs, num_top.value_or(0));
}

const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      return "error";
  }
  return "error";
}

}  // namespace spl::router
