#include "services/wire/convert.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>
#include <variant>

#include "services/base/check.h"
#include "services/base/ids.h"
#include "services/base/status.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/model/fp8_activations.h"
#include "services/methods/methods.h"
#include "services/wire/request_options.h"

namespace spl::wire {

engine::SamplingParams FromProto(const v1::SamplingParams& p) {
  engine::SamplingParams s;
  s.max_tokens = p.max_tokens();
  s.min_tokens = p.min_tokens();
  if (p.has_temperature()) s.temperature = p.temperature();
  // Above the range of int32_t the whole vocabulary is kept anyway.
  s.top_k = static_cast<int32_t>(std::min<uint32_t>(p.top_k(), INT32_MAX));
  if (p.has_top_p()) s.top_p = p.top_p();
  s.min_p = p.min_p();
  if (p.has_repetition_penalty()) s.repetition_penalty = p.repetition_penalty();
  s.presence_penalty = p.presence_penalty();
  s.frequency_penalty = p.frequency_penalty();
  s.seed = p.seed();
  // A protobuf map has no order; ours must be the same everywhere.
  for (const auto& [token, bias] : p.logit_bias()) s.logit_bias.emplace_back(static_cast<int32_t>(token), bias);
  std::sort(s.logit_bias.begin(), s.logit_bias.end());
  s.stop_token_ids.assign(p.stop_token_ids().begin(), p.stop_token_ids().end());
  s.ignore_eos = p.ignore_eos();
  s.num_forks = p.n() == 0 ? 1 : static_cast<int32_t>(std::min<uint32_t>(p.n(), INT32_MAX));
  if (p.has_logprobs()) s.num_logprobs = static_cast<int32_t>(std::min<uint32_t>(p.logprobs(), INT32_MAX));
  return s;
}

namespace {

// Beyond any limit stays beyond it, so that the check names the field.
int32_t Bounded(uint32_t value) { return static_cast<int32_t>(std::min<uint32_t>(value, INT32_MAX)); }

// Sets the members whose fields the message has.
template <typename Options>
void ReadOptions(const v1::ReuseOptions& proto, std::span<const engine::OptionField<Options>> fields,
                 Options& options) {
  for (const engine::OptionField<Options>& option : fields) {
    const RequestOption& declared = FindRequestOption(option.name);
    if (!declared.IsSet(proto)) continue;
    const google::protobuf::Message& message = declared.In(proto);
    const auto& reflection = *message.GetReflection();
    const auto* const field = declared.field;
    std::visit(
        [&](auto member) {
          auto& value = options.*member;
          if constexpr (std::is_same_v<decltype(value), int32_t&>)
            value = Bounded(reflection.GetUInt32(message, field));
          if constexpr (std::is_same_v<decltype(value), double&>) value = reflection.GetDouble(message, field);
          if constexpr (std::is_same_v<decltype(value), bool&>) value = reflection.GetBool(message, field);
          if constexpr (std::is_same_v<decltype(value), std::string&>) value = reflection.GetString(message, field);
        },
        option.member);
  }
}

}  // namespace

engine::DecodeOptions DecodeOptionsOf(const v1::ReuseOptions& proto) {
  engine::DecodeOptions decode;
  decode.selector = proto.decode();
  ReadOptions<engine::DecodeOptions>(proto, engine::kDecodeOptionFields, decode);
  return decode;
}

engine::ReuseOptions FromProto(const v1::ReuseOptions& proto) {
  engine::ReuseOptions reuse;
  reuse.policy = methods::PolicyOf(proto.policy(), proto.quality());
  ReadOptions<engine::ReuseOptions>(proto, engine::kReuseOptionFields, reuse);
  return reuse;
}

absl::StatusOr<std::vector<engine::ReuseSpan>> FromProto(
    const google::protobuf::RepeatedPtrField<v1::TokenSegment>& proto) {
  std::vector<engine::ReuseSpan> segments;
  for (const v1::TokenSegment& segment : proto) {
    if (segment.begin() > INT32_MAX || segment.end() > INT32_MAX)
      return InvalidArgument("segments: [{}, {}) is beyond any prompt", segment.begin(), segment.end());
    SPLICE_ASSIGN_OR_RETURN(const auto key, DigestFromBytes(segment.namespace_key(), "segments.namespace_key"));
    segments.push_back({{static_cast<int32_t>(segment.begin()), static_cast<int32_t>(segment.end())},
                        key,
                        segment.frozen(),
                        segment.shared()});
  }
  return segments;
}

v1::SampledToken ToProto(const engine::SampledToken& token) {
  v1::SampledToken proto;
  proto.set_token_id(static_cast<uint32_t>(token.token));
  if (token.finish == engine::FinishReason::kStop) proto.set_finish_reason(v1::FINISH_REASON_STOP);
  if (token.finish == engine::FinishReason::kLength) proto.set_finish_reason(v1::FINISH_REASON_LENGTH);
  if (token.finish == engine::FinishReason::kError) proto.set_finish_reason(v1::FINISH_REASON_ERROR);
  if (token.logprob) {
    proto.mutable_logprob()->set_logprob(token.logprob->logprob);
    for (const auto& [id, logprob] : token.logprob->top) {
      auto* candidate = proto.mutable_logprob()->add_top();
      candidate->set_token_id(static_cast<uint32_t>(id));
      candidate->set_logprob(logprob);
    }
  }
  return proto;
}

absl::StatusOr<engine::SampledToken> FromProto(const v1::SampledToken& proto) {
  if (proto.token_id() > INT32_MAX) return InvalidArgument("token_id {} of a sampled token", proto.token_id());
  engine::SampledToken token{.token = static_cast<int32_t>(proto.token_id())};
  switch (proto.finish_reason()) {
    case v1::FINISH_REASON_UNSPECIFIED:
      break;
    case v1::FINISH_REASON_STOP:
      token.finish = engine::FinishReason::kStop;
      break;
    case v1::FINISH_REASON_LENGTH:
      token.finish = engine::FinishReason::kLength;
      break;
    case v1::FINISH_REASON_ERROR:
      token.finish = engine::FinishReason::kError;
      break;
    default:
      return InvalidArgument("finish_reason {} of a sampled token", static_cast<int>(proto.finish_reason()));
  }
  return token;
}

v1::ModelIdentity IdentityOf(const engine::Model& model) {
  v1::ModelIdentity identity;
  identity.set_name(model.config().name);
  identity.set_fingerprint(ToBytes(model.kv_fingerprint()));
  identity.set_layout_digest(ToBytes(model.layout_digest()));
  identity.set_max_context(static_cast<uint32_t>(model.config().max_positions));
  identity.set_vocab_size(static_cast<uint32_t>(model.config().vocab_size));
  identity.set_weights(model.weights_name());
  identity.set_kv_dtype(std::string(kernels::DTypeName(model.kv_dtype())));
  identity.set_fp8_activation_rows(static_cast<uint32_t>(engine::FirstRowsInE4M3(model)));
  identity.set_default_reuse(engine::DefaultReusePolicy(model.head_classes().get(), 0));
  if (const auto& map = model.head_classes(); map != nullptr) {
    const int64_t longest = map->quality().longest;
    identity.set_default_reuse_tokens(static_cast<uint32_t>(longest));
    if (longest > 0) identity.set_default_reuse_longer(engine::DefaultReusePolicy(map.get(), longest + 1));
    identity.set_head_class_digest(ToBytes(map->digest()));
    for (int32_t layer = 0; layer < map->num_layers(); ++layer) {
      for (int32_t h = 0; h < map->num_kv_heads(); ++h)
        identity.mutable_global_heads()->push_back(map->served(layer, h).is_global ? 1 : 0);
    }
    identity.set_num_kv_heads(static_cast<uint32_t>(map->num_kv_heads()));
  }
  return identity;
}

absl::StatusOr<int32_t> PagesOfPool(uint64_t kv_bytes, const engine::Model& model) {
  const uint64_t ranks = static_cast<uint64_t>(model.num_ranks());  // all have equally many
  const uint64_t num_pages = kv_bytes / model.page_bytes() / ranks * ranks;
  if (num_pages < static_cast<uint64_t>(engine::PagesForTokens(model.config(), 256)) || num_pages > INT32_MAX)
    return InvalidArgument("--kv-bytes {} makes {} pages of {} bytes: too {} for this model", kv_bytes, num_pages,
                           model.page_bytes(), num_pages > INT32_MAX ? "many" : "few");
  return static_cast<int32_t>(num_pages);
}

absl::StatusOr<chunk::Digest> DigestFromBytes(const std::string& bytes, const char* field) {
  chunk::Digest digest;
  if (bytes.size() != digest.size())
    return InvalidArgument("{} has {} bytes, {} are needed", field, bytes.size(), digest.size());
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

std::string ToBytes(const chunk::Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

absl::Status CheckFingerprint(const std::string& theirs, const engine::Model& model) {
  if (theirs == ToBytes(model.kv_fingerprint())) return absl::OkStatus();
  return Errorf(absl::StatusCode::kFailedPrecondition,
                "the peer runs another model: its fingerprint is not that of '{}' here; start all workers with the "
                "same model folder",
                model.config().name);
}

absl::Status CheckLayout(const std::string& theirs, const engine::Model& model) {
  if (theirs == ToBytes(model.layout_digest())) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the peer's KV page layout is not ours: start all workers with the same model and --kv-dtype");
}

absl::Status CheckHeadClasses(const std::string& theirs, const engine::Model& model, const std::string& who) {
  const std::string ours = model.head_classes() == nullptr ? "" : ToBytes(model.head_classes()->digest());
  if (theirs == ours) return absl::OkStatus();
  const auto name = [](const std::string& digest) {
    return digest.empty() ? "none" : HexEncode({reinterpret_cast<const uint8_t*>(digest.data()), digest.size()});
  };
  return Errorf(absl::StatusCode::kFailedPrecondition,
                "{} has other head classes: their digest is {}, ours {}; start all workers with the same "
                "head_classes.json",
                who, name(theirs), name(ours));
}

absl::StatusOr<std::shared_ptr<const engine::StreamClasses>> DecodeClassesOf(const engine::ReuseOptions& reuse,
                                                                             const engine::Model& model) {
  if (!engine::UsesHeadClasses(reuse)) return nullptr;
  if (model.head_classes() == nullptr)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "reuse policy '{}' needs head classes, and the model '{}' has no head_classes.json here: make one "
                  "with splice profile",
                  reuse.policy, model.config().name);
  return engine::ServedClasses(*model.head_classes());
}

}  // namespace spl::wire
