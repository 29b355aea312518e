//! The exit codes of commands that fail, and their list in help texts.

use container::life::monitor::FAILED;

/// The exit codes that a command has for its failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitCodes {
    /// A code for each kind of failure: those of most commands.
    Kinds,
    /// Those of podman's commands for containers, volumes and networks.
    Objects,
    /// Those of groups of such commands, of which some remove or look for one.
    Groups,
    /// Those of podman's commands that remove these.
    Removal,
    /// Those of commands that start containers in the background.
    Start,
    /// Those of commands that run a program in a container.
    Run,
}

impl ExitCodes {
    /// Returns the list of codes for help texts.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Kinds => KINDS,
            Self::Objects => OBJECTS,
            Self::Groups | Self::Removal => REMOVAL,
            Self::Start => START,
            Self::Run => RUN,
        }
    }

    /// Returns the exit code of a command line that is wrong.
    pub(crate) const fn usage(self) -> u8 {
        match self {
            Self::Kinds => crate::FAILED,
            // The programs of `run` and `exec` may exit with 2 themselves.
            Self::Objects | Self::Groups | Self::Removal | Self::Start | Self::Run => FAILED,
        }
    }
}

/// Exit codes of most verbs.
const KINDS: &str = "\
    Exit codes: 0 success; 1 a negative result (damage, a difference); 2 an error other than the next ones; 3 there is \
    no such image, container or store; 4 a policy or a registry refuses it; 5 the network or a registry failed; 6 a \
    disk is full";

/// Exit codes of verbs for containers, volumes and networks.
const OBJECTS: &str = "Exit codes: 0 success; 125 any failure";

/// Exit codes of verbs that remove these, and of groups with such verbs.
const REMOVAL: &str = "\
    Exit codes: 0 success; 1 `rm` or `exists` finds no such container, volume or network; 2 `rm` refuses one that runs \
    or is in use; 125 any other failure";

/// Exit codes of verbs that start containers in the background.
const START: &str = "\
    Exit codes: 0 success; 125 Quire or the runtime failed; 126 the program cannot be executed, or a published port is \
    in use; 127 the program, or a file it needs to start, does not exist; `start --attach` has the exit code of the \
    program, and 128+N if signal N killed it";

/// Exit codes of verbs that run a program in a container.
const RUN: &str = "\
    Exit codes: the program's exit code; 128+N if signal N killed it; 125 Quire or the runtime failed; 126 the \
    program cannot be executed, or a published port is in use; 127 the program, or a file it needs to start, does not \
    exist; 255 --timeout expired\n\n\
    Signals: quire passes signals on to the program. The program is PID 1 in its container, so the kernel \
    drops INT and TERM unless the program handles them. Therefore, if `run` receives TERM, it kills a program that \
    neither handles, ignores nor blocks TERM (exit code 143). The third INT or TERM kills the container.\n\n\
    On a terminal, Ctrl-C goes to the program. A second Ctrl-C within two seconds kills a program that is PID 1 and \
    neither handles nor ignores INT. Ctrl-P Ctrl-Q detaches from a container of `run`: it keeps running, and its \
    output goes to its log.";
