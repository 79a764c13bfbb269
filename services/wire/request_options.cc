#include "services/wire/request_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "services/base/check.h"
#include "services/methods/methods.h"
#include "services/methods/quality.h"

namespace spl::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// "a, b" as its parts.
std::vector<std::string_view> Split(std::string_view list) {
  std::vector<std::string_view> parts;
  while (!list.empty()) {
    const size_t comma = list.find(", ");
    parts.push_back(list.substr(0, comma));
    list = comma == std::string_view::npos ? "" : list.substr(comma + 2);
  }
  return parts;
}

void Append(const FieldDescriptor* group, std::vector<RequestOption>* out) {
  const Descriptor& type = group == nullptr ? *v1::ReuseOptions::descriptor() : *group->message_type();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      Append(&field, out);
      continue;
    }
    const std::string& own = field.options().GetExtension(v1::read_by);
    const std::string& methods = own.empty() ? type.options().GetExtension(v1::methods) : own;
    out->push_back({group, &field, &type == v1::DecodeOptions::descriptor(), Split(methods)});
  }
}

std::string_view TypeOf(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true, false";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "share";
    case FieldDescriptor::CPPTYPE_STRING:
      return "word";
    default:
      return "number";
  }
}

template <typename Method>
std::string MethodRow(const Method& method, std::string_view more) {
  return fmt::format("| `{}` | {} | {}{} |\n", method.name, method.is_baseline ? "baseline" : "", method.help, more);
}

}  // namespace

const Message& RequestOption::In(const v1::ReuseOptions& options) const {
  return group == nullptr ? options : options.GetReflection()->GetMessage(options, group);
}

Message& RequestOption::In(v1::ReuseOptions& options) const {
  if (group == nullptr) return options;
  return *options.GetReflection()->MutableMessage(&options, group);
}

bool RequestOption::IsSet(const v1::ReuseOptions& options) const {
  const Message& in = In(options);
  return in.GetReflection()->HasField(in, field);
}

std::span<const RequestOption> RequestOptions() {
  static const std::vector<RequestOption>* const options = [] {
    auto* list = new std::vector<RequestOption>();
    Append(nullptr, list);
    return list;
  }();
  return *options;
}

const RequestOption& FindRequestOption(std::string_view name) {
  const auto options = RequestOptions();
  const auto it = std::find_if(options.begin(), options.end(), [&](const auto& o) { return o.name() == name; });
  SPLICE_CHECK(it != options.end(), "an option that v1.ReuseOptions has");
  return *it;
}

UnreadOption FindUnreadOption(const v1::ReuseOptions& options) {
  if (methods::ParseQuality(options.quality()).value_or(methods::Quality()).strict) return {};
  for (const RequestOption& option : RequestOptions()) {
    const std::string& method = option.of_decoding ? options.decode() : options.policy();
    if (option.methods.empty() || methods::IsAuto(method) || !option.IsSet(options)) continue;
    if (std::find(option.methods.begin(), option.methods.end(), method) == option.methods.end())
      return {&option, method};
  }
  return {};
}

std::string OptionsPage() {
  std::string page =
      "# Methods and options\n\n"
      "Members of the object `splice` of a request over HTTP, fields of `ReuseOptions` over gRPC; with `splice eval`\n"
      "`--reuse NAME:OPTION=VALUE` and `--decode NAME:OPTION=VALUE` (there without `decode_`). An option of a group "
      "may also\n"
      "stand in an object of the group's name, as it does over gRPC: `{\"samkv\": {\"budget_ratio\": 0.25}}`.\n\n"
      "An option beside a method that does not read it is refused. Beside `auto` it counts where the method that is "
      "chosen\n"
      "reads it. `splice eval --methods` prints this page; it is made from `proto/spl/v1/reuse.proto` and\n"
      "`services/methods/methods.cc`.\n\n"
      "## How a prompt is computed: `reuse`\n\n| method | | |\n| --- | --- | --- |\n";
  for (const methods::Policy& policy : methods::Policies()) {
    const bool always = policy.head_classes == methods::HeadClasses::kAlways;
    page += MethodRow(policy, always ? "; needs head classes" : "");
  }
  page += "\n## How tokens are decoded: `decode`\n\n| method | | |\n| --- | --- | --- |\n";
  for (const methods::Selector& selector : methods::Selectors()) page += MethodRow(selector, "");
  const FieldDescriptor* group = nullptr;
  page += "\n## Options of every request\n\n| option | | methods | |\n| --- | --- | --- | --- |\n";
  for (const RequestOption& option : RequestOptions()) {
    if (option.group != group) {
      group = option.group;
      page += fmt::format("\n## Group `{}`\n\n| option | | methods | |\n| --- | --- | --- | --- |\n", group->name());
    }
    page +=
        fmt::format("| `{}` | {} | {} | {} |\n", option.name(), TypeOf(*option.field),
                    option.methods.empty() ? "all" : fmt::format("{}", fmt::join(option.methods, ", ")), option.help());
  }
  return page;
}

}  // namespace spl::wire
