// Items of OpenAI's Responses API as messages of a chat.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "services/router/request/translated_request.h"

namespace spl::router {

// Adds items one by one to the messages of a chat. One thread; borrows the request.
//
//   message               a message: an answer's text joins the answer that is being put together
//   reasoning             reasoning_content of the answer that follows; its summary has no effect
//   function_call         a call of the answer in front of it, or of a new one
//   function_call_output  a message of role tool
class ResponseItems {
 public:
  explicit ResponseItems(TranslatedRequest* out) : out_(*out) {}

  // `path`: the item's name in errors ("input[2]"). InvalidArgument names the field.
  absl::Status Add(const Json& item, const std::string& path);
  // The last answer is complete. Call it after the last item.
  void Finish();

 private:
  absl::Status AddMessage(const Json& item, const std::string& path);
  absl::Status AddReasoning(const Json& item, const std::string& path);
  absl::Status AddCall(const Json& item, const std::string& path);
  absl::Status AddResult(const Json& item, const std::string& path);
  absl::StatusOr<Json> ReadContent(const Json& content, const std::string& path);
  std::string NextMessage() const;
  void Push(Json message, const std::string& path);

  // The answer that is being put together: one turn of the model is several items.
  struct Answer {
    bool open = false;
    std::string path;  // its first item's name
    Json content = Json::array();
    Json calls = Json::array();
    std::string reasoning;
  };
  Answer& OpenAnswer(const std::string& path);

  TranslatedRequest& out_;
  Answer answer_;
};

}  // namespace spl::router
