//! Attributes of files in an upper layer: overlayfs's own marks, and the files' attributes.

use store::Who;

/// Where an overlay keeps its marks. Source: Linux `fs/overlayfs/overlayfs.h`, `OVL_XATTR_TRUSTED_PREFIX` and
/// `OVL_XATTR_USER_PREFIX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keeping {
    /// As root's.
    Trusted,
    /// As those of user namespaces.
    User,
}

impl Keeping {
    /// Who may have made the overlays that this process looks at.
    pub(super) fn of(who: Who) -> Self {
        if who.is_host_root() { Self::Trusted } else { Self::User }
    }

    const fn prefix(self) -> &'static [u8] {
        match self {
            Self::Trusted => b"trusted.overlay.",
            Self::User => b"user.overlay.",
        }
    }
}

/// Behind the prefix of marks that the container itself has set, for an overlay of its own: seen without it in there.
/// Source: `OVL_XATTR_ESCAPE_PREFIX`.
const ESCAPE: &[u8] = b"overlay.";

/// Names and values.
pub(super) type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Whether something of the image shows through a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Opaque {
    /// It does.
    #[default]
    No,
    /// It does, and empty files in there that are marked are whiteouts.
    Marked,
    /// Nothing.
    Yes,
}

/// The marks of one file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Marks {
    pub(super) opaque: Opaque,
    /// Where in the image a directory, or the bytes of a file, come from: absolute, or a name in the same directory.
    pub(super) redirect: Option<Vec<u8>>,
    /// The file has only metadata: its bytes are the image's.
    pub(super) is_metacopy: bool,
    /// In a directory that is [`Opaque::Marked`]: a whiteout.
    pub(super) is_whiteout: bool,
}

/// Tells marks from what is the file's own, which comes out in byte order of its names.
pub(super) fn split(xattrs: Pairs, keeping: Keeping) -> (Marks, Pairs) {
    let mut marks = Marks::default();
    let mut own = Pairs::new();
    for (name, value) in xattrs {
        let prefix = keeping.prefix();
        match name.strip_prefix(prefix) {
            None => own.push((name, value)),
            Some(rest) if rest.starts_with(ESCAPE) => {
                own.push(([prefix, &rest[ESCAPE.len()..]].concat(), value));
            }
            Some(b"opaque") => match &value[..] {
                b"y" => marks.opaque = Opaque::Yes,
                b"x" => marks.opaque = Opaque::Marked,
                _ => {}
            },
            Some(b"redirect") => marks.redirect = Some(value),
            Some(b"metacopy") => marks.is_metacopy = true,
            Some(b"whiteout") => marks.is_whiteout = true,
            // Of no meaning for what is seen: `origin`, `impure`, `nlink`, `upper`, `uuid`; `protattr` has inode flags,
            // which tars cannot say.
            Some(_) => {}
        }
    }
    own.retain(|(name, _)| !WHITEOUTS.contains(&&name[..]));
    own.sort_unstable();
    (marks, own)
}

/// composefs marks a directory that has whiteouts of the image so. No image has them as xattrs of its own: its reader leaves
/// them out, too (`MARKS` in `image::erofs::read`).
const WHITEOUTS: [&[u8]; 2] = [b"trusted.overlay.whiteouts", b"user.overlay.whiteouts"];

#[cfg(test)]
mod tests {
    use super::*;

    fn check(xattrs: &[(&str, &str)], marks: &Marks, own: &[(&str, &str)]) {
        let pairs = |from: &[(&str, &str)]| -> Pairs {
            from.iter()
                .map(|(name, value)| (name.as_bytes().into(), value.as_bytes().into()))
                .collect()
        };
        let expect = (marks.clone(), pairs(own));
        assert_eq!(split(pairs(xattrs), Keeping::Trusted), expect, "{xattrs:?}");
        // In a user namespace it is the other way round.
        let turned = |from: Pairs| -> Pairs {
            let turn = |name: Vec<u8>| {
                let (trusted, user) = (Keeping::Trusted.prefix(), Keeping::User.prefix());
                match (name.strip_prefix(trusted), name.strip_prefix(user)) {
                    (Some(rest), _) => [user, rest].concat(),
                    (None, Some(rest)) => [trusted, rest].concat(),
                    (None, None) => name,
                }
            };
            let mut all: Pairs =
                from.into_iter().map(|(name, value)| (turn(name), value)).collect();
            all.sort_unstable();
            all
        };
        let expect = (marks.clone(), turned(pairs(own)));
        assert_eq!(split(turned(pairs(xattrs)), Keeping::User), expect, "{xattrs:?}");
    }

    #[test]
    fn only_marks_of_this_overlay_are_taken_off() {
        let none = Marks::default();
        check(
            &[("user.b", "1"), ("trusted.a", "2")],
            &none,
            &[("trusted.a", "2"), ("user.b", "1")],
        );
        for (value, opaque) in [("y", Opaque::Yes), ("x", Opaque::Marked), ("n", Opaque::No)] {
            check(&[("trusted.overlay.opaque", value)], &Marks { opaque, ..none.clone() }, &[]);
        }
        for name in ["origin", "impure", "nlink", "protattr", "uuid", "upper", "later"] {
            check(&[(&format!("trusted.overlay.{name}"), "y")], &none, &[]);
        }
        let redirect = Some(b"/a/b".to_vec());
        let copied = Marks { redirect, is_metacopy: true, ..none.clone() };
        let marks = [("trusted.overlay.redirect", "/a/b"), ("trusted.overlay.metacopy", "")];
        check(&marks, &copied, &[]);
        let whiteout = Marks { is_whiteout: true, ..none.clone() };
        check(&[("trusted.overlay.whiteout", "")], &whiteout, &[]);
        check(
            &[("trusted.overlay.overlay.opaque", "y"), ("user.overlay.opaque", "y")],
            &none,
            &[("trusted.overlay.opaque", "y"), ("user.overlay.opaque", "y")],
        );
        let has_whiteouts = [
            ("trusted.overlay.overlay.opaque", "x"),
            ("trusted.overlay.overlay.whiteouts", ""),
            ("user.overlay.whiteouts", ""),
        ];
        check(&has_whiteouts, &none, &[("trusted.overlay.opaque", "x")]);
        check(
            &[("trusted.overlay.overlay.overlay.a", "")],
            &none,
            &[("trusted.overlay.overlay.a", "")],
        );
    }
}
