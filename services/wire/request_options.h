// The options of a request as v1.ReuseOptions declares them, one by one: what reads JSON, checks, converts and prints
// options goes through this list and knows none by name. Without the engine: also for the router.
#pragma once

#include <google/protobuf/message.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spl/v1/reuse.pb.h"

namespace spl::wire {

struct RequestOption {
  const google::protobuf::FieldDescriptor* group;  // of v1.ReuseOptions; null: the option is a field of it
  const google::protobuf::FieldDescriptor* field;
  bool of_decoding;                       // `methods` are selectors; false: policies
  std::vector<std::string_view> methods;  // that read it; empty: all

  // In JSON. No two options, whatever their groups, have the same.
  const std::string& name() const { return field->has_json_name() ? field->json_name() : field->name(); }
  std::string_view help() const { return field->options().GetExtension(v1::help); }
  // The message that the option is a field of.
  const google::protobuf::Message& In(const v1::ReuseOptions& options) const;
  google::protobuf::Message& In(v1::ReuseOptions& options) const;
  bool IsSet(const v1::ReuseOptions& options) const;
};

// In the order of their declaration. Made once; any thread.
std::span<const RequestOption> RequestOptions();
// REQUIRES: there is one of that name.
const RequestOption& FindRequestOption(std::string_view name);

struct UnreadOption {
  const RequestOption* option = nullptr;
  std::string method;  // that the request names
};
// The first option that is set and that the method named does not read; null: there is none. What "auto" stands for and
// strict quality are taken to read all.
UnreadOption FindUnreadOption(const v1::ReuseOptions& options);

// docs/options.md: every method and every option.
std::string OptionsPage();

}  // namespace spl::wire
