/* Makes calls of the kernel, one a line of output: what each returned, 0 or the number of its error. */
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void told(const char *name, long result) {
    printf("%s %d\n", name, result < 0 ? errno : 0);
    fflush(stdout);
}

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
