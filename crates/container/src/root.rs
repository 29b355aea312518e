//! Root file systems: an image of the store, its objects or devices, and optionally a writable layer.

mod acl;
mod assemble;
pub mod filestore;
pub mod headroom;
mod layers;
pub mod lend;
pub mod limit;
mod make;
mod mount_points;
mod place;
pub mod share;
mod tree;
pub mod trust;
pub(crate) mod upper;
mod via;

pub use acl::acl_for_ids;
pub use assemble::{Root, RootError, Shape, Space};
pub(crate) use layers::{Checked, Data, Layers};
pub use make::{MakeRootError, SOURCE, Warm, make, may_have_acl, warm};
pub use place::{PlaceError, SpaceError, WritablePlace, WritableWish, space, suits_overlay};
pub use tree::{TreeError, name_below_overlay, set_below_overlay};
pub use trust::{PageDomain, Trust, TrustError, TrustedImage, VerityPolicy};
pub use upper::{Doomed, UpperError, Writable};
pub use via::{Above, LendImage, LentMount, ServeImage, ServedImage, Via, WithXattrs};
