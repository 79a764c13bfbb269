// Lists the options of a request, as v1.ReuseOptions declares them. Code that reads JSON, checks, converts or prints
// options goes through this list and knows no option by name. It does not include the engine, so that the router can
// use it.
#pragma once

#include <google/protobuf/message.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spl/v1/reuse.pb.h"

namespace spl::wire {

struct RequestOption {
  const google::protobuf::FieldDescriptor* group;  // in v1.ReuseOptions; null: the option is in no group
  const google::protobuf::FieldDescriptor* field;
  bool of_decoding;                       // `methods` are selectors; false: policies
  std::vector<std::string_view> methods;  // methods that read it; empty: all

  // Name in JSON. It is unique over all groups.
  const std::string& name() const { return field->has_json_name() ? field->json_name() : field->name(); }
  std::string_view help() const { return field->options().GetExtension(v1::help); }
  // The message that the option is a field of.
  const google::protobuf::Message& In(const v1::ReuseOptions& options) const;
  google::protobuf::Message& In(v1::ReuseOptions& options) const;
  bool IsSet(const v1::ReuseOptions& options) const;
};

// All options, in the order of their declaration. Made once; any thread.
std::span<const RequestOption> RequestOptions();
// REQUIRES: there is an option of that name.
const RequestOption& FindRequestOption(std::string_view name);

struct UnreadOption {
  const RequestOption* option = nullptr;
  std::string method;  // the method that the request names
};
// The first option that is set although the method of the request does not read it; null: there is none. "auto" and
// strict quality count as methods that read all options.
UnreadOption FindUnreadOption(const v1::ReuseOptions& options);

// Text of docs/options.md: every method and every option.
std::string OptionsPage();

}  // namespace spl::wire
