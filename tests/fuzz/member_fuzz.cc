// What etcd and the Kubernetes API say of members: any bytes give a member or InvalidArgument, and a member that was
// read is the same when it has been written and read again.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "services/membership/endpoint_slices.h"
#include "services/membership/member_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto member = spl::membership::MemberFromJson(text);
  if (member.ok()) {
    const auto again = spl::membership::MemberFromJson(spl::membership::ToJson(*member));
    if (!again.ok() || !(*again == *member)) std::abort();
  } else if (member.status().code() != absl::StatusCode::kInvalidArgument) {
    std::abort();
  }
  const nlohmann::json object = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) return 0;
  spl::membership::EndpointSlices slices("splice-prefill", "grpc");
  const absl::Status status = slices.Put(object);
  if (!status.ok() && status.code() != absl::StatusCode::kInvalidArgument) std::abort();
  spl::membership::Members members = slices.members();
  spl::membership::Normalize(members);
  slices.Remove(object);
  return 0;
}
