// A prompt as a turn of a conversation (docs/sessions.md).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/session_table.h"
#include "spl/v1/decode.pb.h"

namespace spl::decode {

struct Conversation {
  std::string name;
  chunk::Digest namespace_key{}, owner{};
  std::vector<chunk::ChunkKey> blocks;  // keys of the prompt's full pages

  engine::SessionId id() const { return {name, namespace_key, owner}; }
};

// Returns nullopt for a request that names none, and for policies other than exact: their KV may be approximate.
// InvalidArgument names the field.
absl::StatusOr<std::optional<Conversation>> ReadConversation(const v1::ReserveRequest& request);

}  // namespace spl::decode
