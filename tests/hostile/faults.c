/* Makes operations on files whose paths match a pattern fail, for tests. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* OPEN is opening to read, CREATE all that makes or changes a name: opening to write, mkdir, … */
enum { READ = 1, WRITE = 2, SYNC = 4, OPEN = 8, CREATE = 16 };
enum { SHORT = -1, END = -2 }; /* Other faults are the number of an error. */

static _Atomic int operations, fault;
static _Atomic long every, calls, fired;
static char wanted[4096];

/* Lets every n-th of some operations on matching files fail; operations 0 stops that. */
void hostile_arm(int which, int what, long n, const char *pattern) {
  operations = 0;
  snprintf(wanted, sizeof wanted, "%s", pattern);
  fault = what, every = n, calls = 0, fired = 0;
  operations = which;
}

long hostile_fired(void) { return fired; }

static int strikes_path(int operation, const char *path) {
  if (!(operations & operation) || !path) return 0;
  if (fnmatch(wanted, path, 0) || ++calls % every) return 0;
  fired++;
  return 1;
}

static int strikes(int operation, int descriptor) {
  if (!(operations & operation)) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strikes_path(operation, path);
}

#define NEXT(type, name, ...) \
  static type (*next)(__VA_ARGS__); \
  if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define FAIL(operation, size, shorter) \
  if (strikes(operation, descriptor)) { \
    if (fault == END) return 0; \
    if (fault != SHORT) return errno = fault, -1; \
    if ((size) > 1) return shorter; \
  }

#define BUFFER(name, type, operation) \
  ssize_t name(int descriptor, type buffer, size_t size) { \
    NEXT(ssize_t, #name, int, type, size_t); \
    FAIL(operation, size, next(descriptor, buffer, size / 3 + 1)) \
    return next(descriptor, buffer, size); \
  }
#define BUFFER_AT(name, type, operation) \
  ssize_t name(int descriptor, type buffer, size_t size, off_t offset) { \
    NEXT(ssize_t, #name, int, type, size_t, off_t); \
    FAIL(operation, size, next(descriptor, buffer, size / 3 + 1, offset)) \
    return next(descriptor, buffer, size, offset); \
  }
/* Python reads with these, a single part at a time. */
#define VECTOR_AT(name) \
  ssize_t name(int descriptor, const struct iovec *parts, int count, off_t offset, int flags) { \
    NEXT(ssize_t, #name, int, const struct iovec *, int, off_t, int); \
    struct iovec less = {parts->iov_base, parts->iov_len / 3 + 1}; \
    FAIL(READ, parts->iov_len, next(descriptor, &less, 1, offset, flags)) \
    return next(descriptor, parts, count, offset, flags); \
  }

BUFFER(read, void *, READ)
BUFFER(write, const void *, WRITE)
BUFFER_AT(pread, void *, READ)
BUFFER_AT(pread64, void *, READ)
BUFFER_AT(pwrite, const void *, WRITE)
BUFFER_AT(pwrite64, const void *, WRITE)
VECTOR_AT(preadv2)
VECTOR_AT(preadv64v2)

/* TensorStore writes with this one. */
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
  NEXT(ssize_t, "writev", int, const struct iovec *, int);
  FAIL(WRITE, 0, 0)
  return next(descriptor, parts, count);
}

int fsync(int descriptor) {
  NEXT(int, "fsync", int);
  FAIL(SYNC, 0, 0)
  return next(descriptor);
}

#define FAIL_PATH(operation, path) \
  if (fault > 0 && strikes_path(operation, path)) return errno = fault, -1
#define KIND(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT) ? CREATE : OPEN)
#define MODE \
  mode_t mode = 0; \
  if (flags & (O_CREAT | __O_TMPFILE)) { \
    va_list more; \
    va_start(more, flags); \
    mode = va_arg(more, mode_t); \
    va_end(more); \
  }

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    MODE \
    NEXT(int, #name, const char *, int, ...); \
    FAIL_PATH(KIND(flags), path); \
    return next(path, flags, mode); \
  }
#define OPENS_AT(name) \
  int name(int directory, const char *path, int flags, ...) { \
    MODE \
    NEXT(int, #name, int, const char *, int, ...); \
    FAIL_PATH(KIND(flags), path); \
    return next(directory, path, flags, mode); \
  }

OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

int mkdir(const char *path, mode_t mode) {
  NEXT(int, "mkdir", const char *, mode_t);
  FAIL_PATH(CREATE, path);
  return next(path, mode);
}

int rename(const char *from, const char *to) {
  NEXT(int, "rename", const char *, const char *);
  FAIL_PATH(CREATE, to);
  return next(from, to);
}

int link(const char *from, const char *to) {
  NEXT(int, "link", const char *, const char *);
  FAIL_PATH(CREATE, to);
  return next(from, to);
}
