// JSON of answers: its text, server-sent events, usage and receipts.
#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>
#include <string>

#include "services/router/request/request.h"

namespace spl::router {

using OrderedJson = nlohmann::ordered_json;

// JSON text; bytes that are not UTF-8 become U+FFFD instead of an exception.
std::string Dump(const OrderedJson& json);

// The double of the float's own digits: 0.7, not 0.699999988079071.
double Shortest(float value);

// "data: {...}\n\n"
std::string SseEvent(const OrderedJson& json);
// "event: TYPE\ndata: {...}\n\n", with the member "type" of `json`.
std::string NamedSseEvent(const OrderedJson& json);

OrderedJson UsageJson(const FinalInfo& final);
// The member "splice" of an answer: its receipt, or a list of receipts if there are several prompts.
OrderedJson ReceiptsJson(const FinalInfo& final);
// JSON of a v1.Receipt, by its declaration: each field at its path. Messages and optional fields that are not set are
// left out, and so are empty maps.
OrderedJson ReceiptJson(const google::protobuf::Message& receipt);

}  // namespace spl::router
