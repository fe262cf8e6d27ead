// Health: what calls and probes say about a directory, and what becomes of it.
#include "posix/health.h"

#include <cerrno>
#include <string>
#include <vector>

#include "fixture.h"
#include "harness.h"

namespace cachestore::test {
namespace {

using Call = Health::Call;
using Use = Health::Use;
using std::chrono::milliseconds;

Status Error(int error) { return Status::FromErrno(error, "write", "/root/file"); }

struct Judged {
  EventRing events;
  Health health{events, "/root"};

  std::string NextEvent(cs_event_level level) {
    const auto event = events.Take();
    if (!event.has_value()) return "none";
    EXPECT_EQ(event->level, level);
    return event->text;
  }
  bool IsQuiet() { return !events.Take().has_value(); }
  // A probe when the next one is due; the pause before it.
  milliseconds Probe(const Status& read, const Status& written) {
    milliseconds waited{0};
    while (!health.ProbeIsDue(now)) {
      now += milliseconds(250);
      waited += milliseconds(250);
    }
    health.NoteProbe(read, written, now);
    return waited;
  }
  Health::Clock::time_point now = Health::Clock::now();
};

}  // namespace

TEST(Health, IsGoodUntilSomethingFails) {
  Judged judged;
  EXPECT_TRUE(judged.health.use() == Use::kFull);
  EXPECT_FALSE(judged.health.full());
  judged.health.Note(Call::kRead, Status::Ok());
  judged.health.Note(Call::kWrite, Status::Ok());
  EXPECT_FALSE(judged.health.ProbeIsDue(judged.now + std::chrono::hours(1)));
  EXPECT_TRUE(judged.IsQuiet());
}

// Errors of the device, the mount or the server, three in a row.
TEST(Health, FailuresInARowTakeItOutOfUse) {
  for (const int error : {EIO, ENODEV, ENXIO, ETIMEDOUT, ESTALE, ENOTCONN, EHOSTDOWN, EUCLEAN}) {
    for (const Call call : {Call::kRead, Call::kWrite}) {
      Judged judged;
      judged.health.Note(call, Error(error));
      judged.health.Note(call, Error(error));
      EXPECT_TRUE(judged.health.use() == Use::kFull);
      EXPECT_TRUE(judged.IsQuiet());
      judged.health.Note(call, Error(error));
      EXPECT_TRUE(judged.health.use() == Use::kOut);
      const std::string text = judged.NextEvent(CS_EVENT_WARNING);
      EXPECT_NE(text.find("/root is out of use"), std::string::npos);
      EXPECT_NE(text.find(Error(error).text()), std::string::npos);
      // What still runs says nothing new, well or badly.
      judged.health.Note(call, Error(error));
      judged.health.Note(call, Status::Ok());
      EXPECT_TRUE(judged.health.use() == Use::kOut);
      EXPECT_TRUE(judged.IsQuiet());
    }
  }
}

// "Not there" is an answer, too.
TEST(Health, ASuccessBetweenStartsTheRowAnew) {
  for (const Status& success : {Status::Ok(), Error(ENOENT)}) {
    Judged judged;
    for (int i = 0; i < 10; ++i) {
      judged.health.Note(Call::kRead, Error(EIO));
      judged.health.Note(Call::kRead, Error(EIO));
      judged.health.Note(Call::kRead, success);
    }
    EXPECT_TRUE(judged.health.use() == Use::kFull);
    EXPECT_TRUE(judged.IsQuiet());
  }
}

// What is about one file, about us, or about the space.
TEST(Health, OtherErrorsAreNoFailures) {
  Judged judged;
  for (const int error :
       {ENOENT, ENOTDIR, EINVAL, ENOMEM, EMFILE, ENFILE, ELOOP, EISDIR, ENOSPC, EDQUOT, EFBIG}) {
    for (int i = 0; i < 10; ++i) {
      judged.health.Note(Call::kRead, Error(error));
      judged.health.Note(Call::kWrite, Error(error));
    }
    EXPECT_TRUE(judged.health.use() == Use::kFull);
  }
  // Nothing that came from no system call.
  for (int i = 0; i < 10; ++i) judged.health.Note(Call::kRead, {CS_IO, "closing"});
  EXPECT_TRUE(judged.health.use() == Use::kFull);
  EXPECT_TRUE(judged.IsQuiet());
}

TEST(Health, AReadOnlyFilesystemSaysSoAtOnce) {
  Judged judged;
  judged.health.Note(Call::kWrite, Error(EROFS));
  EXPECT_TRUE(judged.health.use() == Use::kReadOnly);
  const std::string text = judged.NextEvent(CS_EVENT_WARNING);
  EXPECT_NE(text.find("/root is only read from"), std::string::npos);
  EXPECT_NE(text.find("Read-only file system"), std::string::npos);
  judged.health.Note(Call::kWrite, Error(EROFS));
  EXPECT_TRUE(judged.IsQuiet());
}

// One file may be somebody else's.
TEST(Health, NoRightToWriteIsBelievedTheThirdTime) {
  for (const int error : {EACCES, EPERM}) {
    Judged judged;
    judged.health.Note(Call::kWrite, Error(error));
    judged.health.Note(Call::kWrite, Error(error));
    EXPECT_TRUE(judged.health.use() == Use::kFull);
    judged.health.Note(Call::kWrite, Error(error));
    EXPECT_TRUE(judged.health.use() == Use::kReadOnly);
  }
}

// Reads that go well don't hide writes that fail; what reads is still read from.
TEST(Health, WritesThatFailBetweenReadsMakeItReadOnly) {
  Judged judged;
  for (uint32_t i = 0; i < Health::kPatience; ++i) {
    judged.health.Note(Call::kWrite, Error(EIO));
    judged.health.Note(Call::kRead, Status::Ok());
    EXPECT_TRUE(judged.health.use() == (i + 1 < Health::kPatience ? Use::kFull : Use::kReadOnly));
  }
  for (uint32_t i = 0; i < Health::kPatience; ++i) judged.health.Note(Call::kRead, Error(EIO));
  EXPECT_TRUE(judged.health.use() == Use::kOut);
}

TEST(Health, HungCallsTakeItOutOfUse) {
  Judged judged;
  for (uint32_t i = 0; i < Health::kPatience; ++i) judged.health.NoteHung(Call::kRead);
  EXPECT_TRUE(judged.health.use() == Use::kOut);
  EXPECT_NE(judged.NextEvent(CS_EVENT_WARNING).find("doesn't answer in time"), std::string::npos);
}

TEST(Health, OnlyAProbeBringsItBack) {
  Judged judged;
  for (uint32_t i = 0; i < Health::kPatience; ++i) judged.health.Note(Call::kRead, Error(EIO));
  judged.NextEvent(CS_EVENT_WARNING);
  EXPECT_FALSE(judged.health.ProbeIsDue(judged.now));
  judged.Probe(Error(EIO), Error(EIO));
  EXPECT_TRUE(judged.health.use() == Use::kOut);
  // Read, but not written: not trusted, unless it is known to be read-only.
  judged.Probe(Status::Ok(), Error(EIO));
  EXPECT_TRUE(judged.health.use() == Use::kOut);
  EXPECT_TRUE(judged.IsQuiet());
  judged.Probe(Status::Ok(), Error(EROFS));
  EXPECT_TRUE(judged.health.use() == Use::kReadOnly);
  EXPECT_NE(judged.NextEvent(CS_EVENT_INFO).find("can only be read"), std::string::npos);
  judged.Probe(Status::Ok(), Status::Ok());
  EXPECT_TRUE(judged.health.use() == Use::kFull);
  EXPECT_NE(judged.NextEvent(CS_EVENT_INFO).find("in full use again"), std::string::npos);
  EXPECT_FALSE(judged.health.ProbeIsDue(judged.now + std::chrono::hours(1)));
  EXPECT_TRUE(judged.IsQuiet());
}

TEST(Health, AProbeCanFindItWorse) {
  Judged judged;
  judged.health.Note(Call::kWrite, Error(EROFS));
  judged.Probe(Error(EIO), Error(EIO));
  EXPECT_TRUE(judged.health.use() == Use::kOut);
}

TEST(Health, ProbesBackOff) {
  Judged judged;
  for (uint32_t i = 0; i < Health::kPatience; ++i) judged.health.Note(Call::kRead, Error(EIO));
  std::vector<milliseconds> pauses;
  for (int i = 0; i < 8; ++i) pauses.push_back(judged.Probe(Error(EIO), Error(EIO)));
  for (size_t i = 1; i < pauses.size(); ++i) {
    EXPECT_TRUE(pauses[i] == std::min(milliseconds(1000) * (1 << i), milliseconds(30000)));
  }
}

// Not a line in the log every second or two: a disk whose cached reads answer a
// probe and whose others fail.
TEST(Health, OneThatFailsAgainSoonWaitsLonger) {
  Judged judged;
  std::vector<milliseconds> pauses;
  for (int round = 0; round < 6; ++round) {
    for (uint32_t i = 0; i < Health::kPatience; ++i) judged.health.Note(Call::kRead, Error(EIO));
    EXPECT_TRUE(judged.health.use() == Use::kOut);
    judged.now = Health::Clock::now();
    pauses.push_back(judged.Probe(Status::Ok(), Status::Ok()));
    EXPECT_TRUE(judged.health.use() == Use::kFull);
  }
  EXPECT_TRUE(pauses[0] <= milliseconds(1000));
  EXPECT_TRUE(pauses[5] >= milliseconds(29000));
}

// A full disk is in full use: eviction, or whoever deletes, makes room.
TEST(Health, FullIsOverWithTheNextSuccess) {
  Judged judged;
  judged.health.Note(Call::kWrite, Error(ENOSPC));
  EXPECT_TRUE(judged.health.full());
  EXPECT_TRUE(judged.health.use() == Use::kFull);
  judged.health.Note(Call::kRead, Status::Ok());
  EXPECT_TRUE(judged.health.full());
  judged.health.Note(Call::kWrite, Status::Ok());
  EXPECT_FALSE(judged.health.full());
  // ... or with a probe, where nobody dumps.
  judged.health.Note(Call::kWrite, Error(ENOSPC));
  judged.Probe(Status::Ok(), Error(ENOSPC));
  EXPECT_TRUE(judged.health.full());
  EXPECT_TRUE(judged.health.use() == Use::kFull);
  judged.Probe(Status::Ok(), Status::Ok());
  EXPECT_FALSE(judged.health.full());
  EXPECT_TRUE(judged.IsQuiet());
}

// Out of use before it was ever in use.
TEST(Health, StartsAsItWasOpened) {
  Judged judged;
  judged.health.StartAs(Use::kOut, Error(EIO));
  EXPECT_TRUE(judged.health.use() == Use::kOut);
  EXPECT_NE(judged.NextEvent(CS_EVENT_WARNING).find("out of use"), std::string::npos);
  judged.Probe(Status::Ok(), Status::Ok());
  EXPECT_TRUE(judged.health.use() == Use::kFull);
}

}  // namespace cachestore::test
