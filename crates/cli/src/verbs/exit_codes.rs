//! The exit codes and signals that help texts list.

/// Exit codes of most verbs.
pub(crate) const EXIT_CODES: &str = "\
    Exit codes: 0 success; 1 a negative result (damage, a difference, no such volume); 2 an error other than the next \
    ones; 3 there is no such image, container or store; 4 a policy or a registry refuses it; 5 the network or a \
    registry failed; 6 a disk is full";

/// Exit codes of verbs that start containers in the background.
pub(crate) const START_CODES: &str = "\
    Exit codes: 0 success; 125 Quire or the runtime failed; 126 the program cannot be executed; 127 the program, or a \
    file it needs to start, does not exist; `start --attach` has the exit code of the program, and 128+N if signal N \
    killed it";

/// Exit codes of verbs that run a program in a container.
pub(crate) const RUN_CODES: &str = "\
    Exit codes: the program's exit code; 128+N if signal N killed it; 125 Quire or the runtime failed; 126 the \
    program cannot be executed; 127 the program, or a file it needs to start, does not exist; 255 --timeout \
    expired\n\n\
    Signals: quire passes signals on to the program. The program is PID 1 in its container, so the kernel \
    drops INT and TERM unless the program handles them. Therefore, if `run` receives TERM, it kills a program that \
    neither handles, ignores nor blocks TERM (exit code 143). The third INT or TERM kills the container.\n\n\
    On a terminal, Ctrl-C goes to the program. A second Ctrl-C within two seconds kills a program that is PID 1 and \
    neither handles nor ignores INT. Ctrl-P Ctrl-Q detaches from a container of `run`: it keeps running, and its \
    output goes to its log.";
