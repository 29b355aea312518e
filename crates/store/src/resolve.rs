//! Finds the image for a name, a digest or an image id.

use image::verity::ImageId;

use crate::disk::DiskError;
use crate::shelf::refs::{RefError, RefName, Reference};
use crate::store::Store;
use image::digest::Digest;

/// The image that a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    pub image: ImageId,
    /// The given ref, or else the first ref of this image in byte order. `None` if the image has no name.
    pub name: Option<RefName>,
    /// Digest of the OCI manifest, if a ref has one.
    pub manifest: Option<Digest>,
}

/// A reason why no single image was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    #[error("there is no image \"{}\"", .name.escape_debug())]
    Absent {
        /// The text as given.
        name: String,
        /// Similar names in the store, the most similar one first, at most three.
        nearest: Vec<RefName>,
        /// Image ids that begin with the text, if it is too short to be accepted; sorted, at most three.
        ids: Vec<ImageId>,
    },
    /// The text is the beginning of several image ids.
    #[error("\"{prefix}\" is the prefix of {} image ids: give more digits", .images.len())]
    Ambiguous {
        /// The text as given.
        prefix: String,
        /// All of these images, sorted.
        images: Vec<ImageId>,
    },
    #[error(transparent)]
    Ref(#[from] RefError),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

impl Store {
    /// Minimum number of hexadecimal digits of an abbreviated image id. Shorter texts are likely to be names.
    pub const ID_DIGITS_MIN: usize = 6;

    /// Finds the image for `name`: a ref, a manifest digest (`sha256:…`) that a ref has, or an image id or its
    /// beginning, at least 6 hexadecimal digits.
    ///
    /// # Errors
    /// [`ResolveError`] if there is no such image, or several.
    pub fn resolve(&self, name: &str) -> Result<Resolved, ResolveError> {
        if let Ok(ref_name) = name.parse::<RefName>()
            && let Some(reference) = self.refs.get(&ref_name)?
        {
            let Reference { image, manifest, .. } = reference;
            return Ok(Resolved { image, name: Some(ref_name), manifest });
        }
        // Damaged refs are skipped, because `fsck` reports them.
        let mut refs = Vec::new();
        for ref_name in self.refs.names().map_err(RefError::Disk)? {
            if let Ok(Some(reference)) = self.refs.get(&ref_name) {
                refs.push((ref_name, reference));
            }
        }
        // A name is better than the ref of an image without one.
        refs.sort_by_key(|it| it.0.is_unnamed());
        let named = |name: &RefName| Some(name.clone()).filter(|it| !it.is_unnamed());
        if let Ok(digest) = name.parse::<Digest>()
            && let Some(found) = refs.iter().find(|it| it.1.manifest == Some(digest))
        {
            return Ok(Resolved {
                image: found.1.image,
                name: named(&found.0),
                manifest: Some(digest),
            });
        }
        let prefix = name.to_ascii_lowercase();
        let mut ids = Vec::new();
        if !prefix.is_empty() && prefix.bytes().all(|it| it.is_ascii_hexdigit()) {
            ids = self.images.ids()?;
            ids.retain(|it| it.to_string().starts_with(&prefix));
        }
        if prefix.len() >= Self::ID_DIGITS_MIN {
            match *ids.as_slice() {
                [] => {}
                [image] => {
                    let found = refs.iter().find(|it| it.1.image == image);
                    let (name, manifest) = found.map_or((None, None), |(name, reference)| {
                        (named(name), reference.manifest)
                    });
                    return Ok(Resolved { image, name, manifest });
                }
                _ => return Err(ResolveError::Ambiguous { prefix, images: ids }),
            }
        }
        let names = refs.into_iter().map(|it| it.0).filter(|it| !it.is_unnamed()).collect();
        ids.truncate(3);
        Err(ResolveError::Absent { name: name.to_owned(), nearest: nearest(name, names), ids })
    }
}

/// Returns at most three similar names.
fn nearest(name: &str, names: Vec<RefName>) -> Vec<RefName> {
    let short = |text: &str| {
        let text = text.strip_suffix(":latest").unwrap_or(text);
        text.to_ascii_lowercase()
    };
    let wanted = short(name);
    let mut found: Vec<(usize, RefName)> = Vec::new();
    for candidate in names {
        let full = short(candidate.as_str());
        let base = full.rsplit('/').next().unwrap_or(&full);
        let untagged = base.split(':').next().unwrap_or(base);
        let ways = [full.as_str(), base, untagged];
        if let Some(far) = ways.iter().filter_map(|way| mistyped(&wanted, way)).min() {
            found.push((far, candidate));
        }
    }
    found.sort();
    found.into_iter().take(3).map(|it| it.1).collect()
}

/// Returns the number of wrong letters in `typed`, if it may be a misspelling of `name`: at most a third of its
/// letters.
#[must_use]
pub fn mistyped(typed: &str, name: &str) -> Option<usize> {
    let (far, letters) = (distance(typed, name), typed.chars().count());
    (far <= letters / 3).then_some(far)
}

/// Returns the edit distance: the number of letters to insert, remove, change or swap with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let width = b.len() + 1;
    let mut table = vec![0; (a.len() + 1) * width];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            let at = i * width + j;
            table[at] = if i == 0 || j == 0 {
                i + j
            } else {
                let change = usize::from(a[i - 1] != b[j - 1]);
                let mut best = (table[at - width] + 1).min(table[at - 1] + 1);
                best = best.min(table[at - width - 1] + change);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    best = best.min(table[at - 2 * width - 2] + 1);
                }
                best
            };
        }
    }
    table[a.len() * width + b.len()]
}

#[cfg(test)]
mod tests {
    use super::{distance, mistyped, nearest};

    #[test]
    fn distances() {
        // Levenshtein's classic example, and Damerau's swap.
        for (a, b, far) in
            [("kitten", "sitting", 3), ("", "abc", 3), ("abcd", "abdc", 1), ("same", "same", 0)]
        {
            assert_eq!(distance(a, b), far, "{a} {b}");
            assert_eq!(distance(b, a), far, "{b} {a}");
        }
    }

    #[test]
    fn short_names_are_other_names() {
        for (typed, name, far) in [
            ("c1", "c2", None),
            ("c1", "c1", Some(0)),
            ("c1", "c", None),
            ("web", "wed", Some(1)),
            ("fxed", "fixed", Some(1)),
            ("fixed", "mixes", None),
            ("fixed!", "mixes!", Some(2)),
        ] {
            assert_eq!(mistyped(typed, name), far, "{typed} {name}");
        }
    }

    #[test]
    fn a_person_who_mistypes_is_told_what_was_meant() {
        let names = ["debian:12", "debian", "docker.io/library/postgres:16", "x"];
        for (typed, expected) in [
            ("debain", &["debian:12", "debian:latest"][..]),
            ("Debian", &["debian:12", "debian:latest"]),
            ("postgers", &["docker.io/library/postgres:16"]),
            ("debian:13", &["debian:12", "debian:latest"]),
            ("fedora", &[]),
            ("7", &[]),
        ] {
            let names = names.iter().map(|it| it.parse().unwrap()).collect();
            let found: Vec<_> = nearest(typed, names).iter().map(ToString::to_string).collect();
            assert_eq!(found, expected, "{typed}");
        }
    }
}
