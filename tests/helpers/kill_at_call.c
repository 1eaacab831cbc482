/* Kills a process at the Nth call that changes names or flushes files, counted over the paths that contain a text.

   KILL_AT_PATHS   the text; for fsync and fdatasync the path of the descriptor counts, for unlinkat that of its folder, too
   KILL_AT_ONLY    names of functions; unset: all of those below
   KILL_AT_CALL    N, from 1; unset: nothing is killed
   KILL_AT_REFUSE  names of functions whose calls on these paths fail with ENOSYS instead, as on a file system that lacks them; not counted
   KILL_AT_LOG     file to which every counted call is appended before it is made; the one that kills with "killed" in front

   Preloaded, so it sees calls through the C library only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static int count;

static void write_line(const char *what, const char *name, const char *a, const char *b) {
  char line[9000];
  int length = snprintf(line, sizeof line, "%s%s %s %s\n", what, name, a, b);
  int log = getenv("KILL_AT_LOG") ? open(getenv("KILL_AT_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
  if (log >= 0 && write(log, line, length) == length) close(log);
}

static int among(const char *names, const char *name) {
  char all[512], one[64];
  snprintf(all, sizeof all, " %s ", names);
  snprintf(one, sizeof one, " %s ", name);
  return strstr(all, one) != NULL;
}

/* Whether the call must fail; kills the process if it is the Nth. */
static int refused(const char *name, const char *a, const char *b) {
  const char *text = getenv("KILL_AT_PATHS"), *nth = getenv("KILL_AT_CALL"), *refuse = getenv("KILL_AT_REFUSE");
  const char *only = getenv("KILL_AT_ONLY");
  if (!text || !(strstr(a, text) || strstr(b, text)) || (only && !among(only, name))) return 0;
  if (refuse && among(refuse, name)) {
    write_line("refused ", name, a, b);
    errno = ENOSYS;
    return 1;
  }
  if (!strcmp(name, "flock")) return 0;
  int is_nth = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST) == (nth ? atoi(nth) : 0);
  write_line(is_nth ? "killed " : "", name, a, b);
  if (is_nth) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  return 0;
}

static const char *path_of(int descriptor, char *path, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = descriptor >= 0 ? readlink(link, path, size - 1) : 0;
  path[length > 0 ? length : 0] = 0;
  return path;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define PATH(descriptor) path_of(descriptor, path, sizeof path)

int rename(const char *a, const char *b) { REAL(rename); return refused("rename", a, b) ? -1 : real(a, b); }
int renameat(int d, const char *a, int e, const char *b) { REAL(renameat); return refused("renameat", a, b) ? -1 : real(d, a, e, b); }
int renameat2(int d, const char *a, int e, const char *b, unsigned f) { REAL(renameat2); return refused("renameat2", a, b) ? -1 : real(d, a, e, b, f); }
int unlink(const char *a) { REAL(unlink); return refused("unlink", a, "") ? -1 : real(a); }
int rmdir(const char *a) { REAL(rmdir); return refused("rmdir", a, "") ? -1 : real(a); }
int unlinkat(int d, const char *a, int f) { char path[4096]; REAL(unlinkat); return refused("unlinkat", a, PATH(d)) ? -1 : real(d, a, f); }
int fsync(int d) { char path[4096]; REAL(fsync); return refused("fsync", PATH(d), "") ? -1 : real(d); }
int flock(int d, int f) { char path[4096]; REAL(flock); return refused("flock", PATH(d), "") ? -1 : real(d, f); }
int fdatasync(int d) { char path[4096]; REAL(fdatasync); return refused("fdatasync", PATH(d), "") ? -1 : real(d); }
