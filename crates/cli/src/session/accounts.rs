//! Lines of the host's `/etc/passwd` and `/etc/group`.

/// A line of passwd(5) or group(5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AccountLine<'t> {
    pub(crate) name: &'t str,
    /// Number of the user or group.
    pub(crate) number: u32,
    /// Home directory of a user, if it is an absolute path.
    pub(crate) home: Option<&'t str>,
}

/// Parses such a file, or a line of it. Malformed lines are skipped, as in the C library.
pub(crate) fn accounts(text: &str) -> impl Iterator<Item = AccountLine<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|it| !it.is_empty())?;
        let number = fields.nth(1)?.parse().ok()?;
        let home = fields.nth(2).filter(|it| it.starts_with('/'));
        Some(AccountLine { name, number, home })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_files() {
        let text = "root:x:0:0:root:/root:/bin/sh\nbroken\n:x:1::::\nme:x:1000:100::srv:/bin/sh\n\
                    x:x:y:0::/x:\nadm:x:4:root\n+::::::\n";
        let line = |name, number, home| AccountLine { name, number, home };
        let expect = [line("root", 0, Some("/root")), line("me", 1000, None), line("adm", 4, None)];
        assert_eq!(accounts(text).collect::<Vec<_>>(), expect);
    }
}
