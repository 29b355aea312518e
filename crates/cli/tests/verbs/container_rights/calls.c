/* Makes calls of the kernel, one a line of output: what each returned, 0 or the number of its error. */
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void told(const char *name, long result) {
    printf("%s %d\n", name, result < 0 ? errno : 0);
    fflush(stdout);
}

#ifdef __x86_64__
/* A call as 32-bit programs make it, with arguments in the first 4 GiB. Source of the numbers: Linux
 * arch/x86/entry/syscalls/syscall_32.tbl. */
static long old_call(long number, long first, long second) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(first), "c"(second) : "memory", "r8", "r9", "r10", "r11");
    if ((int)result < 0)
        errno = -(int)result;
    return (int)result;
}

/* In a process of its own, since a kernel without 32-bit programs kills it. */
static void old_socket(const char *name, long call, uint32_t family, uint32_t type, uint32_t protocol) {
    uint32_t *arguments = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    arguments[0] = family;
    arguments[1] = type;
    arguments[2] = protocol;
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        /* socketcall */
        told(name, old_call(102, call, (long)arguments));
        _exit(0);
    }
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) {
        printf("%s unsupported\n", name);
        fflush(stdout);
    }
}
#else
static void old_socket(const char *name, long call, uint32_t family, uint32_t type, uint32_t protocol) {
    (void)call, (void)family, (void)type, (void)protocol;
    printf("%s unsupported\n", name);
    fflush(stdout);
}
#endif

int main(void) {
    /* Larger than what any of these calls writes back. */
    unsigned char nothing[256] = {0};
    /* The session's own keys (0: KEYCTL_GET_KEYRING_ID, -3: KEY_SPEC_SESSION_KEYRING). */
    told("keyctl", syscall(SYS_keyctl, 0, -3, 1));
    told("add_key", syscall(SYS_add_key, "user", "quire-test", "x", 1, -3));
    told("request_key", syscall(SYS_request_key, "user", "quire-none", 0, 0));
    told("io_uring_setup", syscall(SYS_io_uring_setup, 1, nothing));
    told("clone3", syscall(SYS_clone3, nothing, 1));
    told("unknown", syscall(4000));
    told("alg", socket(38, SOCK_SEQPACKET, 0));
    /* The kernel takes the lower half of the family. */
    told("alg-beyond", syscall(SYS_socket, 38 + (1L << 32), SOCK_SEQPACKET, 0));
    told("vsock", socket(40, SOCK_STREAM, 0));
    old_socket("old-alg", 1, 38, SOCK_SEQPACKET, 0);
    old_socket("old-vsock", 1, 40, SOCK_STREAM, 0);
    old_socket("old-audit", 1, AF_NETLINK, SOCK_RAW, 9);
    old_socket("old-unix", 1, AF_UNIX, SOCK_STREAM, 0);
    /* SYS_CONNECT, of no descriptor */
    old_socket("old-connect", 3, -1, 0, 0);
    told("audit", socket(AF_NETLINK, SOCK_RAW, 9));
    told("route", socket(AF_NETLINK, SOCK_RAW, 0));
    told("unix", socket(AF_UNIX, SOCK_STREAM, 0));
    long child = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (child == 0)
        _exit(0);
    told("clone", child);
    child = fork();
    if (child == 0)
        _exit(0);
    told("fork", child);
    told("unshare-files", syscall(SYS_unshare, CLONE_FILES));
    told("unshare-user", syscall(SYS_unshare, CLONE_NEWUSER));
    return 0;
}
