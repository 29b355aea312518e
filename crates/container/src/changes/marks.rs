//! Separates overlayfs's marks on files of an upper layer from the files' own xattrs.

use store::Who;

/// Xattr namespace of an overlay's marks. Source: Linux `fs/overlayfs/overlayfs.h`, `OVL_XATTR_TRUSTED_PREFIX` and
/// `OVL_XATTR_USER_PREFIX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// Overlays of root.
    Trusted,
    /// Overlays in user namespaces.
    User,
}

impl Keeping {
    /// Returns the namespace for overlays that this user may have made.
    pub(crate) fn for_user(who: Who) -> Self {
        if who.is_host_root() { Self::Trusted } else { Self::User }
    }

    const fn prefix(self) -> &'static [u8] {
        match self {
            Self::Trusted => b"trusted.overlay.",
            Self::User => b"user.overlay.",
        }
    }
}

/// Additional prefix of marks that the container itself has set for a nested overlay. The nested overlay sees these
/// marks without it. Source: `OVL_XATTR_ESCAPE_PREFIX`.
const ESCAPE: &[u8] = b"overlay.";

pub(crate) type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Whether entries of the image are visible in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Opaque {
    /// The entries of lower layers are visible.
    #[default]
    No,
    /// The entries of lower layers are visible, and marked empty files in the directory are whiteouts.
    Marked,
    /// The entries of lower layers are hidden.
    Yes,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Marks {
    pub(crate) opaque: Opaque,
    /// Path in the image of the directory, or of the file with the data: absolute, or a name in the same directory.
    pub(crate) redirect: Option<Vec<u8>>,
    /// Whether the file has only metadata, and its data is in the image.
    pub(crate) is_metacopy: bool,
    /// Whether the file is a whiteout, in a directory that is [`Opaque::Marked`].
    pub(crate) is_whiteout: bool,
}

/// Separates marks from the file's own xattrs, which are returned in byte order of their names.
pub(crate) fn split(xattrs: Pairs, keeping: Keeping) -> (Marks, Pairs) {
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
            // `origin`, `impure`, `nlink`, `upper` and `uuid` do not affect the visible files. `protattr` contains
            // inode flags, which a tar cannot represent.
            Some(_) => {}
        }
    }
    own.retain(|(name, _)| !WHITEOUTS.contains(&&name[..]));
    own.sort_unstable();
    (marks, own)
}

/// composefs marks a directory that contains whiteouts of the image with these xattrs. They are not xattrs of the
/// image's files, so the image's reader also leaves them out (`MARKS` in `image::erofs::read`).
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
        // In a user namespace, the prefixes are exchanged.
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
