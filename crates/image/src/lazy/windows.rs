//! Encodes the windows of a group's spans as bytes. The store compresses these bytes.

use super::GROUP;
use crate::gzip::{Checkpoint, WINDOW, Window};

/// Encodes the windows of checkpoints in groups of [`GROUP`] bytes of the blob. Returns for each group the number of
/// its first checkpoint, and the bytes.
#[must_use]
pub fn encode_windows(checkpoints: &[Checkpoint]) -> Vec<(u32, Vec<u8>)> {
    let mut groups: Vec<(u32, Vec<u8>)> = Vec::new();
    let mut current = None;
    for (number, checkpoint) in (0..).zip(checkpoints) {
        let group = checkpoint.packed.checked_div(GROUP);
        if current != group || groups.is_empty() {
            current = group;
            groups.push((number, Vec::new()));
        }
        if let Some((_, bytes)) = groups.last_mut() {
            encode(&checkpoint.window, bytes);
        }
    }
    groups
}

/// Appends a window: the number of runs, then for each run its distance from the end of the previous run and its
/// length, then the bytes of all runs.
fn encode(window: &Window, bytes: &mut Vec<u8>) {
    let mut put = |mut number: usize| {
        while number >= 0x80 {
            bytes.push(0x80 | number.to_le_bytes()[0]);
            number >>= 7;
        }
        bytes.push(number.to_le_bytes()[0]);
    };
    put(window.runs().len());
    let mut end = 0;
    for run in window.runs() {
        put(usize::from(run.start.saturating_sub(end)));
        put(run.len());
        end = run.end;
    }
    bytes.extend(window.bytes());
}

/// Decodes the windows of `spans` spans; `None` for bytes that [`encode_windows`] does not make.
#[must_use]
pub fn decode_windows(bytes: &[u8], spans: usize) -> Option<Vec<Window>> {
    let mut rest = bytes;
    let windows = (0..spans).map(|_| decode(&mut rest)).collect::<Option<Vec<_>>>()?;
    rest.is_empty().then_some(windows)
}

fn decode(rest: &mut &[u8]) -> Option<Window> {
    let mut runs = Vec::new();
    let mut length: usize = 0;
    let mut end: u16 = 0;
    for _ in 0..number(rest)? {
        let start = end.checked_add(number(rest)?)?;
        end = start.checked_add(number(rest)?)?;
        length = length.checked_add(usize::from(end.checked_sub(start)?))?;
        runs.push(start..end);
    }
    let (bytes, behind) = rest.split_at_checked(length).filter(|_| length <= WINDOW)?;
    *rest = behind;
    Window::of_parts(runs, bytes.to_vec())
}

/// Decodes a LEB128 number: seven bits per byte, lowest first. Only the shortest encoding of a number is accepted.
fn number(rest: &mut &[u8]) -> Option<u16> {
    let mut number: u32 = 0;
    for shift in [0, 7, 14] {
        let (byte, behind) = rest.split_first()?;
        *rest = behind;
        number |= u32::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return u16::try_from(number).ok().filter(|_| *byte > 0 || shift == 0);
        }
    }
    None
}
