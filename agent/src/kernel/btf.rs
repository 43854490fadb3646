//! Reader of the kernel's type information (BTF).
//!
//! Finds the offsets of members of kernel structures. Reads the raw encoding in place
//! (<https://docs.kernel.org/bpf/btf.html>) and indexes structures only: the full type graph would take tens of megabytes.
//! Every access is bounds-checked and every walk is bounded, so that malformed data gives an error.

use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;

use thiserror::Error;

/// File of kernels with `CONFIG_DEBUG_INFO_BTF`.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const HEADER_LEN: usize = 24;
/// Walks along typedefs end here.
const MAX_DEPTH: usize = 32;
/// Members searched for one name, anonymous structures included. Real structures have a few hundred.
const MAX_MEMBERS: usize = 20_000;

/// Type information is missing or malformed.
#[derive(Debug, Error)]
pub enum BtfError {
    /// The file cannot be read; a kernel without BTF has no such file.
    #[error("cannot read the kernel's type information {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Not BTF, or truncated.
    #[error("malformed type information: {0}")]
    Malformed(&'static str),
    /// The kernel has no such type, member or constant.
    #[error("the kernel has no {0}")]
    Missing(String),
}

/// Kinds of type, numbered as in the encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Int,
    Ptr,
    Array,
    Struct,
    Union,
    Enum,
    Fwd,
    Typedef,
    Volatile,
    Const,
    Restrict,
    Func,
    FuncProto,
    Var,
    DataSec,
    Float,
    DeclTag,
    TypeTag,
    Enum64,
}

impl Kind {
    fn from_number(number: u32) -> Option<Self> {
        const KINDS: [Kind; 19] = [
            Kind::Int,
            Kind::Ptr,
            Kind::Array,
            Kind::Struct,
            Kind::Union,
            Kind::Enum,
            Kind::Fwd,
            Kind::Typedef,
            Kind::Volatile,
            Kind::Const,
            Kind::Restrict,
            Kind::Func,
            Kind::FuncProto,
            Kind::Var,
            Kind::DataSec,
            Kind::Float,
            Kind::DeclTag,
            Kind::TypeTag,
            Kind::Enum64,
        ];
        let index = usize::try_from(number).ok()?.checked_sub(1)?;
        KINDS.get(index).copied()
    }

    /// Bytes that follow the common part of a type with `vlen` entries.
    fn trailer_len(self, vlen: usize) -> usize {
        match self {
            Self::Int | Self::Var | Self::DeclTag => 4,
            Self::Array => 12,
            Self::Struct | Self::Union | Self::DataSec | Self::Enum64 => vlen * 12,
            Self::Enum | Self::FuncProto => vlen * 8,
            Self::Ptr
            | Self::Fwd
            | Self::Typedef
            | Self::Volatile
            | Self::Const
            | Self::Restrict
            | Self::Func
            | Self::Float
            | Self::TypeTag => 0,
        }
    }

    /// Kinds that only decorate or rename another type.
    fn is_transparent(self) -> bool {
        matches!(self, Self::Typedef | Self::Volatile | Self::Const | Self::Restrict | Self::TypeTag)
    }
}

/// One type: its common part and where its entries begin.
#[derive(Clone, Copy, Debug)]
struct Type {
    name: u32,
    kind: Kind,
    vlen: usize,
    /// The kind flag: members of this structure carry bit field sizes.
    flagged: bool,
    /// Size in bytes, or the id of the type referred to.
    size_or_type: u32,
    /// Offset of the entries in the data.
    entries: usize,
}

/// A place inside a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Bytes from the beginning of the outermost structure.
    pub offset: u32,
    type_id: u32,
}

/// The kernel's type information.
pub struct Btf {
    data: Vec<u8>,
    /// Offset of the string section and its length.
    strings: (usize, usize),
    /// Offset of each type in `data`; id 0 is void and has none.
    types: Vec<u32>,
    /// Structures and unions by name.
    structs: HashMap<Box<[u8]>, u32>,
}

impl Btf {
    /// Reads the file at `path`, usually [`VMLINUX`].
    ///
    /// # Errors
    /// The file is not readable or malformed.
    pub fn read(path: &Path) -> Result<Self, BtfError> {
        let data = std::fs::read(path).map_err(|source| BtfError::Read { path: path.to_owned(), source })?;
        Self::parse(data)
    }

    /// Parses the encoded form, in native byte order.
    ///
    /// # Errors
    /// The data is malformed.
    pub fn parse(data: Vec<u8>) -> Result<Self, BtfError> {
        if data.len() < HEADER_LEN {
            return Err(BtfError::Malformed("shorter than its header"));
        }
        if u16_at(&data, 0) != Some(MAGIC) {
            return Err(BtfError::Malformed("wrong magic number"));
        }
        let field = |at| u32_at(&data, at).map_or(0, |value| value as usize);
        let header_len = field(4);
        let section = |offset: usize, len: usize| {
            let begin = header_len.checked_add(offset)?;
            let end = begin.checked_add(len)?;
            (header_len >= HEADER_LEN && end <= data.len()).then_some((begin, end))
        };
        let (types_begin, types_end) =
            section(field(8), field(12)).ok_or(BtfError::Malformed("the type section is cut off"))?;
        let (strings_begin, strings_end) =
            section(field(16), field(20)).ok_or(BtfError::Malformed("the string section is cut off"))?;
        let mut btf = Self {
            strings: (strings_begin, strings_end - strings_begin),
            types: vec![0],
            structs: HashMap::new(),
            data,
        };
        btf.index(types_begin, types_end)?;
        Ok(btf)
    }

    fn index(&mut self, mut at: usize, end: usize) -> Result<(), BtfError> {
        while at < end {
            let ty = self.type_at(at).ok_or(BtfError::Malformed("a type is cut off or of unknown kind"))?;
            let next = ty.entries + ty.kind.trailer_len(ty.vlen);
            if next > end {
                return Err(BtfError::Malformed("a type reaches beyond its section"));
            }
            let id = u32::try_from(self.types.len()).map_err(|_| BtfError::Malformed("more types than ids"))?;
            let place = u32::try_from(at).map_err(|_| BtfError::Malformed("larger than four gigabytes"))?;
            self.types.push(place);
            if matches!(ty.kind, Kind::Struct | Kind::Union) && ty.name != 0 {
                let name: Box<[u8]> = self.name(ty.name).into();
                self.structs.entry(name).or_insert(id);
            }
            at = next;
        }
        Ok(())
    }

    fn type_at(&self, at: usize) -> Option<Type> {
        let info = u32_at(&self.data, at + 4)?;
        Some(Type {
            name: u32_at(&self.data, at)?,
            kind: Kind::from_number((info >> 24) & 0x1f)?,
            vlen: (info & 0xffff) as usize,
            flagged: info >> 31 == 1,
            size_or_type: u32_at(&self.data, at + 8)?,
            entries: at + 12,
        })
    }

    fn ty(&self, id: u32) -> Option<Type> {
        let at = *self.types.get(id as usize)?;
        (at != 0).then(|| self.type_at(at as usize))?
    }

    /// The bytes of a name, empty if the offset leads nowhere.
    fn name(&self, offset: u32) -> &[u8] {
        let (begin, len) = self.strings;
        let rest =
            self.data.get(begin..begin + len).and_then(|strings| strings.get(offset as usize..)).unwrap_or_default();
        let end = rest.iter().position(|byte| *byte == 0).unwrap_or(0);
        &rest[..end]
    }

    fn all(&self) -> impl Iterator<Item = (u32, Type)> + '_ {
        (1..self.types.len() as u32).filter_map(|id| Some((id, self.ty(id)?)))
    }

    /// Follows typedefs and qualifiers to the type they stand for.
    fn resolve(&self, mut id: u32) -> Option<(u32, Type)> {
        for _ in 0..MAX_DEPTH {
            let ty = self.ty(id)?;
            if !ty.kind.is_transparent() {
                return Some((id, ty));
            }
            id = ty.size_or_type;
        }
        None
    }

    /// Location of a member: `path` is `struct.member` or `struct.member.member`, and members of
    /// anonymous inner structures count as the outer one's.
    ///
    /// # Errors
    /// The kernel has no such structure or member.
    pub fn place(&self, path: &str) -> Result<Place, BtfError> {
        let missing = || BtfError::Missing(format!("member {path}"));
        let mut parts = path.split('.');
        let name = parts.next().unwrap_or_default();
        let root = self.structs.get(name.as_bytes()).ok_or_else(|| BtfError::Missing(format!("struct {name}")))?;
        let mut place = Place { offset: 0, type_id: *root };
        for part in parts {
            let inner = self.member(place.type_id, part.as_bytes()).ok_or_else(missing)?;
            place =
                Place { offset: place.offset.checked_add(inner.offset).ok_or_else(missing)?, type_id: inner.type_id };
        }
        Ok(place)
    }

    /// Byte offset of a member; see [`Btf::place`].
    ///
    /// # Errors
    /// The kernel has no such structure or member.
    pub fn offset(&self, path: &str) -> Result<u32, BtfError> {
        self.place(path).map(|place| place.offset)
    }

    fn member(&self, struct_id: u32, name: &[u8]) -> Option<Place> {
        let mut budget = MAX_MEMBERS;
        let mut open = vec![Place { offset: 0, type_id: struct_id }];
        while let Some(outer) = open.pop() {
            let (_, ty) = self.resolve(outer.type_id)?;
            if !matches!(ty.kind, Kind::Struct | Kind::Union) {
                continue;
            }
            budget = budget.checked_sub(ty.vlen + 1)?;
            for index in 0..ty.vlen {
                let at = ty.entries + index * 12;
                let member_name = u32_at(&self.data, at)?;
                let raw = u32_at(&self.data, at + 8)?;
                let bits = if ty.flagged { raw & 0xff_ffff } else { raw };
                let offset = outer.offset.checked_add(bits / 8)?;
                let place = Place { offset, type_id: u32_at(&self.data, at + 4)? };
                if member_name == 0 {
                    open.push(place);
                } else if self.name(member_name) == name {
                    return Some(place);
                }
            }
        }
        None
    }

    /// First element and element size of an array that lies at `place`.
    pub fn elements(&self, place: Place) -> Option<(Place, u32)> {
        let (_, array) = self.resolve(place.type_id)?;
        if array.kind != Kind::Array {
            return None;
        }
        let type_id = u32_at(&self.data, array.entries)?;
        let first = Place { offset: place.offset, type_id };
        Some((first, self.size(type_id)?))
    }

    /// Location of a member inside the structure at `place`.
    pub fn within(&self, place: Place, member: &str) -> Option<Place> {
        let inner = self.member(place.type_id, member.as_bytes())?;
        Some(Place { offset: place.offset.checked_add(inner.offset)?, type_id: inner.type_id })
    }

    fn size(&self, id: u32) -> Option<u32> {
        let (_, ty) = self.resolve(id)?;
        match ty.kind {
            Kind::Int | Kind::Struct | Kind::Union | Kind::Enum | Kind::Enum64 | Kind::Float => Some(ty.size_or_type),
            Kind::Ptr => Some(size_of::<usize>() as u32),
            _ => None,
        }
    }

    /// Value of an enumerator of any enumeration.
    ///
    /// # Errors
    /// The kernel has no such enumerator.
    pub fn constant(&self, name: &str) -> Result<u32, BtfError> {
        self.all()
            .filter(|(_, ty)| ty.kind == Kind::Enum)
            .find_map(|(_, ty)| {
                (0..ty.vlen).find_map(|index| {
                    let at = ty.entries + index * 8;
                    let found = self.name(u32_at(&self.data, at)?) == name.as_bytes();
                    found.then(|| u32_at(&self.data, at + 4))?
                })
            })
            .ok_or_else(|| BtfError::Missing(format!("constant {name}")))
    }

    /// Whether argument number `index` of a tracepoint, counted from 0, is a pointer.
    ///
    /// # Errors
    /// The kernel has no such tracepoint or argument.
    pub fn tracepoint_takes_pointer(&self, name: &str, index: usize) -> Result<bool, BtfError> {
        let missing = || BtfError::Missing(format!("argument {index} of tracepoint {name}"));
        let (_, typedef) = self
            .find(Kind::Typedef, &format!("btf_trace_{name}"))
            .ok_or_else(|| BtfError::Missing(format!("tracepoint {name}")))?;
        let (_, pointer) = self.resolve(typedef.size_or_type).ok_or_else(missing)?;
        let (_, proto) = self.resolve(pointer.size_or_type).ok_or_else(missing)?;
        // The first parameter of every tracepoint function is the `__data` pointer.
        if proto.kind != Kind::FuncProto || index + 1 >= proto.vlen {
            return Err(missing());
        }
        let at = proto.entries + (index + 1) * 8;
        let parameter = u32_at(&self.data, at + 4).ok_or_else(missing)?;
        let (_, ty) = self.resolve(parameter).ok_or_else(missing)?;
        Ok(ty.kind == Kind::Ptr)
    }

    fn find(&self, kind: Kind, name: &str) -> Option<(u32, Type)> {
        self.all().find(|(_, ty)| ty.kind == kind && self.name(ty.name) == name.as_bytes())
    }
}

fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    let bytes = data.get(at..at.checked_add(2)?)?;
    bytes.try_into().ok().map(u16::from_ne_bytes)
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    let bytes = data.get(at..at.checked_add(4)?)?;
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
#[path = "btf_tests.rs"]
mod tests;
