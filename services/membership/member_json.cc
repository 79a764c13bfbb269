#include "services/membership/member_json.h"

#include <nlohmann/json.hpp>

#include "services/base/address.h"
#include "services/base/field_error.h"
#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"
#include "services/base/status.h"

namespace spl::membership {
namespace {

using nlohmann::json;

constexpr size_t kMaxBytes = 16384;  // many times the size of a member

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
  SPLICE_ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, "member"));
  JsonObjectReader reader(object, "member: ");
  Member member;
  std::string role;
  reader.String("role", &role);
  reader.String("address", &member.address);
  reader.String("worker_id", &member.worker_id);
  reader.Uint64("epoch", &member.epoch);
  reader.String("fingerprint", &member.fingerprint);
  reader.String("head_map", &member.head_map);
  reader.Uint64("capacity", &member.capacity);
  reader.Uint32("wire_min", &member.wire_min);
  reader.Uint32("wire_max", &member.wire_max);
  SPLICE_RETURN_IF_ERROR(reader.status());
  if (role != "prefill" && role != "decode")
    return FieldError("member: role", fmt::format("must be prefill or decode, got '{}'", role));
  member.role = role == "prefill" ? Role::kPrefill : Role::kDecode;
  SPLICE_RETURN_IF_ERROR(Annotate(ParseHostPort(member.address).status(), "member"));
  return member;
}

}  // namespace spl::membership
