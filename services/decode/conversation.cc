#include "services/decode/conversation.h"

#include <cstring>

#include "services/base/status.h"
#include "services/methods/methods.h"
#include "services/wire/convert.h"

namespace spl::decode {

absl::StatusOr<std::optional<Conversation>> ReadConversation(const v1::ReserveRequest& request) {
  const v1::Conversation& proto = request.conversation();
  const v1::ReuseOptions& reuse = request.reuse();
  const std::string_view policy = methods::PolicyOf(reuse.policy(), reuse.quality());
  if (proto.name().empty() || methods::ResolvePolicy(policy, false, "") != methods::kExact) return std::nullopt;
  SPLICE_RETURN_IF_ERROR(engine::CheckSessionName(proto.name()));
  Conversation turn{.name = proto.name(), .blocks = {}};
  SPLICE_ASSIGN_OR_RETURN(turn.namespace_key,
                          wire::DigestFromBytes(proto.namespace_key(), "conversation.namespace_key"));
  SPLICE_ASSIGN_OR_RETURN(turn.owner, wire::DigestFromBytes(proto.owner(), "conversation.owner"));
  constexpr size_t kKeyBytes = sizeof(chunk::Digest);
  const std::string& keys = proto.chunk_keys();
  if (keys.size() % kKeyBytes != 0 || keys.size() / kKeyBytes > request.prompt_tokens() / chunk::kChunkTokens)
    return InvalidArgument(
        "conversation.chunk_keys has {} bytes; {} for each full block of {} prompt tokens is the most", keys.size(),
        kKeyBytes, request.prompt_tokens());
  turn.blocks.resize(keys.size() / kKeyBytes);
  for (size_t i = 0; i < turn.blocks.size(); ++i)
    std::memcpy(turn.blocks[i].bytes.data(), keys.data() + i * kKeyBytes, kKeyBytes);
  return turn;
}

}  // namespace spl::decode
