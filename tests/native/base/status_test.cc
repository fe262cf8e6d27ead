#include "base/status.h"

#include <cerrno>
#include <memory>
#include <stdexcept>

#include "harness.h"

namespace cachestore::test {

TEST(Status, OkIsTheDefaultAndHasNoText) {
  EXPECT_OK(Status());
  EXPECT_EQ(Status::Ok().code(), CS_OK);
  EXPECT_EQ(Status::Ok().text(), "");
}

// F02: everything that means "no room" is CS_NO_SPACE, also a size limit.
TEST(Status, EveryErrnoHasItsCode) {
  const std::pair<int, Code> expected[] = {
      {ENOSPC, CS_NO_SPACE},   {EDQUOT, CS_NO_SPACE},
      {EFBIG, CS_NO_SPACE},    {ENOENT, CS_NOT_FOUND},
      {ENOTDIR, CS_NOT_FOUND}, {EINVAL, CS_INVALID},
      {ENOMEM, CS_NO_MEMORY},  {EIO, CS_IO},
      {EACCES, CS_IO},         {EROFS, CS_IO},
      {EMFILE, CS_IO},         {ESTALE, CS_NOT_FOUND},
  };
  for (const auto& [error, code] : expected) {
    EXPECT_EQ(Status::FromErrno(error, "open", "/a/b").code(), code);
  }
}

TEST(Status, TextNamesTheCallThePathAndTheReason) {
  const std::string text = Status::FromErrno(EACCES, "open", "/a/b").text();
  EXPECT_EQ(text, "open /a/b: Permission denied");
}

TEST(Result, HoldsAValueOrAStatus) {
  Result<std::unique_ptr<int>> value(std::make_unique<int>(7));
  ASSERT_OK(value);
  EXPECT_EQ(*value.value(), 7);
  EXPECT_OK(value.status());
  const Result<std::unique_ptr<int>> error(Status(CS_IO, "no"));
  EXPECT_FALSE(error.ok());
  EXPECT_EQ(error.status().code(), CS_IO);
  EXPECT_EQ(error.status().text(), "no");
}

// F26's kin: what a worker's code throws becomes a code.
TEST(Thrown, TurnsExceptionsIntoCodes) {
  EXPECT_EQ(Thrown([] {}), CS_OK);
  EXPECT_EQ(Thrown([] { throw std::bad_alloc(); }), CS_NO_MEMORY);
  EXPECT_EQ(Thrown([] { throw std::runtime_error("x"); }), CS_INTERNAL);
  EXPECT_EQ(Thrown([] { throw 1; }), CS_INTERNAL);
}

}  // namespace cachestore::test
