// Bodies of the admin API: JSON ↔ plain structs. Pure functions.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "services/router/kb/knowledge_bases.h"
#include "services/router/request/openai_response.h"

namespace spl::router {

struct PublishBody {
  PublishInput input;
  bool stream = false;
};
// All return InvalidArgument with the field as param; unknown members are refused.
absl::StatusOr<PublishBody> ParsePublishBody(std::string_view body);
absl::StatusOr<uint64_t> ParseSwapBody(std::string_view body);  // {"version": N}
absl::StatusOr<CallerNamespace> ParseCreateNamespaceBody(std::string_view body);
absl::StatusOr<CallerNamespaceChange> ParseUpdateNamespaceBody(std::string_view body);
// "12" → 12. `field` names it in errors.
absl::StatusOr<uint64_t> ParseVersionNumber(const std::string& text, const std::string& field);

OrderedJson VersionJson(const KbVersion& version, bool current);
OrderedJson HeadJson(const KbHead& head);  // without documents
OrderedJson ViewJson(const KbView& view);
OrderedJson DiffJson(const KnowledgeBases::DiffResult& diff, const std::string& name);
OrderedJson ProgressJson(const PublishProgress& progress);
OrderedJson NamespaceJson(const CallerNamespace& ns);

}  // namespace spl::router
