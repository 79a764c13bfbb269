#include "services/membership/static_list.h"

#include <utility>

namespace spl::membership {
namespace {

class StaticList final : public Discovery {
 public:
  explicit StaticList(Members members) : members_(std::move(members)) {}
  void Start(OnChange on_change) override { on_change(members_); }
  void Stop() override {}
  std::string description() const override { return "static"; }

 private:
  const Members members_;
};

}  // namespace

std::unique_ptr<Discovery> MakeStaticList(const std::vector<std::string>& prefill,
                                          const std::vector<std::string>& decode) {
  Members members;
  for (const std::string& address : prefill) members.push_back({.role = Role::kPrefill, .address = address});
  for (const std::string& address : decode) members.push_back({.role = Role::kDecode, .address = address});
  Normalize(members);
  return std::make_unique<StaticList>(std::move(members));
}

}  // namespace spl::membership
