//! Changes how other processes see this process in `/proc/PID/cmdline` and `/proc/PID/environ`.
//!
//! Both files show the memory of the process in which the kernel stored the strings at exec (proc_pid_cmdline(5)).
//! Every user of the host may read the first. After a fork, a child shows its parent's strings for as long as it
//! lives.
#![expect(unsafe_code, reason = "the strings are reached by their addresses")]

use std::ffi::{OsStr, OsString};
use std::ops::Range;

/// Clears the environment that other processes see. `std::env` and programs that this process starts still have the
/// variables, because these move to the heap. Call it before a second thread starts. Does nothing without `/proc`.
pub fn hide_environment() {
    let Some(Strings { environment, .. }) = Strings::own() else { return };
    // A variable whose name begins with `=` can be inherited, but std cannot set it.
    let variables =
        std::env::vars_os().filter(|(name, _)| !name.as_encoded_bytes().contains(&b'='));
    let variables: Vec<(OsString, OsString)> = variables.collect();
    // SAFETY: there is one thread, so no other thread reads the environment.
    if unsafe { libc::clearenv() } != 0 {
        return;
    }
    for (name, value) in variables {
        // SAFETY: there is one thread.
        unsafe { std::env::set_var(name, value) };
    }
    fill(&environment, &[]);
}

/// Replaces the command line that other processes see. It is truncated to the length of the old one. Afterwards
/// `std::env::args_os` is useless. Call it before a second thread starts. Does nothing without `/proc`.
pub fn show_as(words: &[&OsStr]) {
    let Some(Strings { arguments, .. }) = Strings::own() else { return };
    let mut text = words.join(OsStr::new("\0")).into_encoded_bytes();
    // The last byte stays zero, because otherwise the kernel also shows the environment that follows.
    text.truncate(arguments.len().saturating_sub(1));
    fill(&arguments, &text);
}

/// Addresses of the strings that the kernel stored at exec.
struct Strings {
    arguments: Range<usize>,
    environment: Range<usize>,
}

impl Strings {
    /// Reads the addresses of this process. Source: proc_pid_stat(5), fields 48 to 51.
    fn own() -> Option<Self> {
        let stat = super::stat_of(rustix::process::getpid())?;
        let fields: Vec<usize> =
            stat.split_whitespace().skip(45).map_while(|it| it.parse().ok()).collect();
        let [arguments_start, arguments_end, start, end, ..] = fields[..] else { return None };
        let (arguments, environment) = (arguments_start..arguments_end, start..end);
        // The environment must follow the arguments. Any other order means that the fields were misread.
        let is_sound = arguments.start > 0
            && arguments.start < arguments.end
            && arguments.end <= environment.start
            && environment.start <= environment.end;
        is_sound.then_some(Self { arguments, environment })
    }
}

/// Overwrites a memory range with a text, which must fit, followed by zeros.
fn fill(place: &Range<usize>, text: &[u8]) {
    for (index, address) in place.clone().enumerate() {
        let byte = text.get(index).copied().unwrap_or(0);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: the kernel stored strings at these addresses, which the process may write. No references to them
        // exist, because `std` copies each string when it reads it. Zeros only end strings earlier.
        unsafe { to.write_volatile(byte) };
    }
}
