//! Signals by name or number, as people and images write them.

/// A text that names no signal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a signal: use a name, for example TERM or RTMIN+3, or a number from 1 to 64"
)]
pub struct SignalError(String);

/// Names of the signals 1 to 31. Source: signal(7).
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// Returns the name of a signal, such as `SIGTERM` or `SIGRTMIN+3`; of an unknown one, its number.
#[must_use]
pub fn signal_name(number: u8) -> String {
    let at = usize::from(number);
    match (at.checked_sub(1).and_then(|at| NAMES.get(at)), number) {
        (Some(name), _) => format!("SIG{name}"),
        (None, 34..=64) => format!("SIGRTMIN+{}", at - 34),
        (None, _) => number.to_string(),
    }
}

/// Returns the number of a signal named by a user or an image. Runtimes support fewer names, and some runtimes
/// silently ignore unknown names. Source: signal(7); real-time signals are 34 to 64, as in glibc and other engines.
pub fn signal_number(signal: &str) -> Result<u8, SignalError> {
    let upper = signal.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let offset = |text: &str, sign: char| match text {
        "" => Some(0),
        _ => text.strip_prefix(sign)?.parse::<u8>().ok().filter(|it| *it <= 30),
    };
    let number = if let Some(at) = NAMES.iter().position(|it| *it == name) {
        u8::try_from(at + 1).ok()
    } else if let Some(rest) = name.strip_prefix("RTMIN") {
        offset(rest, '+').map(|it| 34 + it)
    } else if let Some(rest) = name.strip_prefix("RTMAX") {
        offset(rest, '-').map(|it| 64 - it)
    } else {
        signal.parse().ok().filter(|it| (1..=64).contains(it))
    };
    number.ok_or_else(|| SignalError(signal.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_by_name_and_number() {
        let check = |signal, expect: Option<u8>| {
            assert_eq!(signal_number(signal).ok(), expect, "{signal}");
        };
        check("TERM", Some(15));
        check("sigterm", Some(15));
        check("9", Some(9));
        check("64", Some(64));
        check("0", None);
        check("65", None);
        check("RTMIN", Some(34));
        check("SIGRTMIN+3", Some(37));
        check("RTMAX-1", Some(63));
        check("RTMIN-1", None);
        check("NONE", None);
    }

    #[test]
    fn numbers_have_names() {
        for (number, name) in [(1, "SIGHUP"), (15, "SIGTERM"), (31, "SIGSYS"), (37, "SIGRTMIN+3")] {
            assert_eq!(signal_name(number), name);
            assert_eq!(signal_number(name), Ok(number));
        }
        assert_eq!([0, 32, 65].map(signal_name), ["0", "32", "65"]);
    }
}
