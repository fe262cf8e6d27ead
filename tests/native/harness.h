// A small test harness; harness.cc has the main program.
//
//   TEST(Suite, Name) { EXPECT_EQ(1 + 1, 2); }
//
// EXPECT_* notes a failure and goes on; ASSERT_* also returns from the function
// it stands in, which must return void. Both may be used on any thread that
// ends before the test does. Failures print the place and both values.
//
// The program takes [--list] [--filter SUBSTRING]; the filter looks at
// "Suite.Name". Exit status: 0 all passed, 1 a test failed or none matched,
// 77 every test was skipped.
#ifndef CACHESTORE_TESTS_HARNESS_H_
#define CACHESTORE_TESTS_HARNESS_H_

#include <concepts>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cachestore::test {

// True always, so that a namespace-scope variable can carry the call.
bool Register(const char* suite, const char* name, void (*body)());
void Fail(const char* file, int line, const std::string& text);
void Skip(const char* file, int line, const std::string& reason);

// What the program does instead of its tests when it is started as
// `--role NAME ARGUMENT...` (cache/processes.h). Its exit status is the
// function's, or 1 if an EXPECT_* failed in it.
using Role = int (*)(const std::vector<std::string>& arguments);
bool RegisterRole(const char* name, Role role);

template <typename T>
concept Printable = requires(std::ostream& out, const T& value) { out << value; };

// An integer that std::cmp_equal and its kin accept: no bool, no character
// but the ones that serve as bytes.
template <typename T>
concept Integer = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> &&
                  !std::same_as<T, wchar_t> && !std::same_as<T, char8_t> &&
                  !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;

template <typename T>
concept CharArray =
    std::is_array_v<T> && std::same_as<std::remove_cv_t<std::remove_extent_t<T>>, char>;

template <typename T>
std::string Print(const T& value) {
  std::ostringstream out;
  if constexpr (std::same_as<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::integral<T> && sizeof(T) == 1) {
    out << +value;
  } else if constexpr (std::is_null_pointer_v<T>) {
    out << "null";
  } else if constexpr (std::convertible_to<const T&, std::string_view>) {
    if constexpr (std::is_pointer_v<T>) {
      if (value == nullptr) return "null";
    }
    out << '"' << std::string_view(value) << '"';
  } else if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (Printable<T>) {
    out << value;
  } else {
    out << "(" << sizeof(T) << " bytes)";
  }
  return out.str();
}

// A comparison by value: integers of different signedness compare as numbers,
// and a string literal compares as text with a string or a char pointer.
#define CACHESTORE_TEST_OPERATOR(Struct, op, cmp)          \
  struct Struct {                                          \
    static constexpr const char* kText = #op;              \
    template <typename A, typename B>                      \
    static bool Holds(const A& a, const B& b) {            \
      if constexpr (Integer<A> && Integer<B>) {            \
        return std::cmp(a, b);                             \
      } else if constexpr (CharArray<A> || CharArray<B>) { \
        return std::string_view(a) op std::string_view(b); \
      } else {                                             \
        return a op b;                                     \
      }                                                    \
    }                                                      \
  };
CACHESTORE_TEST_OPERATOR(Equal, ==, cmp_equal)
CACHESTORE_TEST_OPERATOR(NotEqual, !=, cmp_not_equal)
CACHESTORE_TEST_OPERATOR(Less, <, cmp_less)
CACHESTORE_TEST_OPERATOR(LessEqual, <=, cmp_less_equal)
CACHESTORE_TEST_OPERATOR(Greater, >, cmp_greater)
CACHESTORE_TEST_OPERATOR(GreaterEqual, >=, cmp_greater_equal)
#undef CACHESTORE_TEST_OPERATOR

template <typename Operator, typename A, typename B>
bool Compare(const char* file, int line, const char* a_text, const char* b_text, const A& a,
             const B& b) {
  if (Operator::Holds(a, b)) return true;
  Fail(file, line,
       std::string("expected ") + a_text + " " + Operator::kText + " " + b_text +
           "\n    left:  " + Print(a) + "\n    right: " + Print(b));
  return false;
}

template <typename T>
bool CheckBool(const char* file, int line, const char* text, const T& value, bool expected) {
  if (static_cast<bool>(value) == expected) return true;
  Fail(file, line, std::string("expected ") + text + " to be " + (expected ? "true" : "false"));
  return false;
}

// For Status and Result<T>: prints the error's code and text.
template <typename T>
bool CheckOk(const char* file, int line, const char* text, const T& outcome) {
  if (outcome.ok()) return true;
  const auto& status = [&]() -> decltype(auto) {
    if constexpr (requires { outcome.status(); }) {
      return outcome.status();
    } else {
      return (outcome);
    }
  }();
  Fail(file, line,
       std::string("expected ") + text + " to be ok\n    code: " + Print(status.code()) +
           "\n    text: " + Print(status.text()));
  return false;
}

// A new directory, under `parent` or else $TMPDIR or else /tmp, removed with
// all that is in it.
class TempDir {
 public:
  explicit TempDir(const std::string& parent = "");
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace cachestore::test

#define TEST(Suite, Name)                                                  \
  static void Suite##_##Name##_Test();                                     \
  [[maybe_unused]] static const bool Suite##_##Name##_registered =         \
      ::cachestore::test::Register(#Suite, #Name, &Suite##_##Name##_Test); \
  static void Suite##_##Name##_Test()

#define CACHESTORE_TEST_COMPARE(Operator, a, b) \
  ::cachestore::test::Compare<::cachestore::test::Operator>(__FILE__, __LINE__, #a, #b, a, b)
#define CACHESTORE_TEST_ASSERT(check) \
  do {                                \
    if (!(check)) return;             \
  } while (false)

#define EXPECT_EQ(a, b) CACHESTORE_TEST_COMPARE(Equal, a, b)
#define EXPECT_NE(a, b) CACHESTORE_TEST_COMPARE(NotEqual, a, b)
#define EXPECT_LT(a, b) CACHESTORE_TEST_COMPARE(Less, a, b)
#define EXPECT_LE(a, b) CACHESTORE_TEST_COMPARE(LessEqual, a, b)
#define EXPECT_GT(a, b) CACHESTORE_TEST_COMPARE(Greater, a, b)
#define EXPECT_GE(a, b) CACHESTORE_TEST_COMPARE(GreaterEqual, a, b)
#define EXPECT_TRUE(a) ::cachestore::test::CheckBool(__FILE__, __LINE__, #a, a, true)
#define EXPECT_FALSE(a) ::cachestore::test::CheckBool(__FILE__, __LINE__, #a, a, false)
#define EXPECT_OK(a) ::cachestore::test::CheckOk(__FILE__, __LINE__, #a, a)

#define ASSERT_EQ(a, b) CACHESTORE_TEST_ASSERT(EXPECT_EQ(a, b))
#define ASSERT_NE(a, b) CACHESTORE_TEST_ASSERT(EXPECT_NE(a, b))
#define ASSERT_LT(a, b) CACHESTORE_TEST_ASSERT(EXPECT_LT(a, b))
#define ASSERT_LE(a, b) CACHESTORE_TEST_ASSERT(EXPECT_LE(a, b))
#define ASSERT_GT(a, b) CACHESTORE_TEST_ASSERT(EXPECT_GT(a, b))
#define ASSERT_GE(a, b) CACHESTORE_TEST_ASSERT(EXPECT_GE(a, b))
#define ASSERT_TRUE(a) CACHESTORE_TEST_ASSERT(EXPECT_TRUE(a))
#define ASSERT_FALSE(a) CACHESTORE_TEST_ASSERT(EXPECT_FALSE(a))
#define ASSERT_OK(a) CACHESTORE_TEST_ASSERT(EXPECT_OK(a))

// Ends the test, unless it failed before, as skipped.
#define SKIP(reason)                                        \
  do {                                                      \
    ::cachestore::test::Skip(__FILE__, __LINE__, (reason)); \
    return;                                                 \
  } while (false)

#endif  // CACHESTORE_TESTS_HARNESS_H_
