#include "services/membership/member_json.h"

#include <nlohmann/json.hpp>

#include "services/base/address.h"
#include "services/base/status.h"

namespace spl::membership {
namespace {

using nlohmann::json;

constexpr size_t kMaxBytes = 16384;  // many times the size of a member

absl::Status Read(const json& object, const char* name, std::string* value) {
  const auto found = object.find(name);
  if (found == object.end()) return absl::OkStatus();
  if (!found->is_string()) return InvalidArgument("field '{}' of a member is not a text", name);
  *value = found->get<std::string>();
  return absl::OkStatus();
}

template <typename Integer>
absl::Status Read(const json& object, const char* name, Integer* value) {
  const auto found = object.find(name);
  if (found == object.end()) return absl::OkStatus();
  if (!found->is_number_unsigned() || found->get<uint64_t>() > std::numeric_limits<Integer>::max())
    return InvalidArgument("field '{}' of a member is not a number that fits", name);
  *value = found->get<Integer>();
  return absl::OkStatus();
}

}  // namespace

std::string ToJson(const Member& member) {
  nlohmann::ordered_json object;
  object["role"] = RoleName(member.role);
  object["address"] = member.address;
  object["worker_id"] = member.worker_id;
  object["epoch"] = member.epoch;
  object["fingerprint"] = member.fingerprint;
  object["head_map"] = member.head_map;
  object["capacity"] = member.capacity;
  object["wire_min"] = member.wire_min;
  object["wire_max"] = member.wire_max;
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<Member> MemberFromJson(std::string_view text) {
  if (text.size() > kMaxBytes) return InvalidArgument("a member of {} bytes, at most {}", text.size(), kMaxBytes);
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return InvalidArgument("a member is not a JSON object");
  Member member;
  std::string role;
  SPLICE_RETURN_IF_ERROR(Read(object, "role", &role));
  if (role != "prefill" && role != "decode") return InvalidArgument("role of a member is '{}'", role);
  member.role = role == "prefill" ? Role::kPrefill : Role::kDecode;
  SPLICE_RETURN_IF_ERROR(Read(object, "address", &member.address));
  SPLICE_RETURN_IF_ERROR(Annotate(ParseHostPort(member.address).status(), "member"));
  SPLICE_RETURN_IF_ERROR(Read(object, "worker_id", &member.worker_id));
  SPLICE_RETURN_IF_ERROR(Read(object, "epoch", &member.epoch));
  SPLICE_RETURN_IF_ERROR(Read(object, "fingerprint", &member.fingerprint));
  SPLICE_RETURN_IF_ERROR(Read(object, "head_map", &member.head_map));
  SPLICE_RETURN_IF_ERROR(Read(object, "capacity", &member.capacity));
  SPLICE_RETURN_IF_ERROR(Read(object, "wire_min", &member.wire_min));
  SPLICE_RETURN_IF_ERROR(Read(object, "wire_max", &member.wire_max));
  return member;
}

}  // namespace spl::membership
