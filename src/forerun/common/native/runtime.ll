; What numba's code asks of its runtime: counted memory. A block starts with numba's MemInfo: the count, a destructor
; (0 for none), its argument, the address of the data, and their size. At the end: the function that calls a shim and makes numpy arrays of
; such memory. The library gives the functions of Python and numpy that are called there.

target triple = "$triple"

declare ptr @malloc(i64)
declare ptr @realloc(ptr, i64)
declare void @free(ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare ptr @PyCapsule_New(ptr, ptr, ptr)
declare ptr @PyCapsule_GetPointer(ptr, ptr)
declare ptr @PyArray_NewFromDescr(ptr, ptr, i32, ptr, ptr, ptr, i32, ptr)
declare i32 @PyArray_SetBaseObject(ptr, ptr)
declare ptr @PyArray_NewCopy(ptr, i32)

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %extra = add i64 %wide, 64
  %total = add i64 %size, %extra
  %overflow = icmp ult i64 %total, %size
  br i1 %overflow, label %none, label %some
none:
  ret ptr null
some:
  %block = call ptr @malloc(i64 %total)
  %failed = icmp eq ptr %block, null
  br i1 %failed, label %none, label %made
made:
  %start = ptrtoint ptr %block to i64
  %beyond = add i64 %start, %extra
  %remainder = urem i64 %beyond, %wide
  %data = sub i64 %beyond, %remainder
  %pointer = inttoptr i64 %data to ptr
  store i64 1, ptr %block
  %dtor = getelementptr i64, ptr %block, i64 1
  store i64 0, ptr %dtor
  %info = getelementptr i64, ptr %block, i64 2
  store i64 0, ptr %info
  %place = getelementptr i64, ptr %block, i64 3
  store ptr %pointer, ptr %place
  %length = getelementptr i64, ptr %block, i64 4
  store i64 %size, ptr %length
  ret ptr %block
}

; The destructor of a list: it calls the destructor of the items, and gives their memory back.
define internal void @free_items(ptr %items, i64 %size, ptr %destructor) {
  %none = icmp eq ptr %destructor, null
  br i1 %none, label %free, label %call
call:
  call void %destructor(ptr %items)
  br label %free
free:
  call void @free(ptr %items)
  ret void
}

define ptr @NRT_MemInfo_new_varsize_dtor(i64 %size, ptr %destructor) {
  %items = call ptr @malloc(i64 %size)
  %block = call ptr @malloc(i64 64)
  store i64 1, ptr %block
  %dtor = getelementptr i64, ptr %block, i64 1
  store ptr @free_items, ptr %dtor
  %info = getelementptr i64, ptr %block, i64 2
  store ptr %destructor, ptr %info
  %place = getelementptr i64, ptr %block, i64 3
  store ptr %items, ptr %place
  %length = getelementptr i64, ptr %block, i64 4
  store i64 %size, ptr %length
  ret ptr %block
}

define ptr @NRT_MemInfo_varsize_realloc(ptr %block, i64 %size) {
  %place = getelementptr i64, ptr %block, i64 3
  %before = load ptr, ptr %place
  %items = call ptr @realloc(ptr %before, i64 %size)
  store ptr %items, ptr %place
  %length = getelementptr i64, ptr %block, i64 4
  store i64 %size, ptr %length
  ret ptr %items
}

define void @NRT_MemInfo_call_dtor(ptr %block) {
  %slot = getelementptr i64, ptr %block, i64 1
  %dtor = load ptr, ptr %slot
  %plain = icmp eq ptr %dtor, null
  br i1 %plain, label %free, label %call
call:
  %info_place = getelementptr i64, ptr %block, i64 2
  %info = load ptr, ptr %info_place
  %data_place = getelementptr i64, ptr %block, i64 3
  %data = load ptr, ptr %data_place
  %length = getelementptr i64, ptr %block, i64 4
  %size = load i64, ptr %length
  call void %dtor(ptr %data, i64 %size, ptr %info)
  br label %free
free:
  call void @free(ptr %block)
  ret void
}

define void @forerun_release(ptr %block) {
  %before = atomicrmw sub ptr %block, i64 1 acq_rel
  %last = icmp eq i64 %before, 1
  br i1 %last, label %free, label %kept
free:
  call void @NRT_MemInfo_call_dtor(ptr %block)
  ret void
kept:
  ret void
}

; The destructor of the capsule that an array keeps its memory in.
define internal void @release_capsule(ptr %capsule) {
  %block = call ptr @PyCapsule_GetPointer(ptr %capsule, ptr null)
  call void @forerun_release(ptr %block)
  ret void
}

; Returns one numpy array, or null with Python's error set. `spec` holds the dtype and the number of dimensions; `words`
; hold the block (0 where the data lie in an argument, which are copied), the address of the data, and the lengths.
define internal ptr @array_of(ptr %type, ptr %spec, ptr %words) {
  %dtype = load ptr, ptr %spec
  %ndim_place = getelementptr i64, ptr %spec, i64 1
  %ndim_long = load i64, ptr %ndim_place
  %ndim = trunc i64 %ndim_long to i32
  %block = load ptr, ptr %words
  %data_place = getelementptr i64, ptr %words, i64 1
  %data = load ptr, ptr %data_place
  %lengths = getelementptr i64, ptr %words, i64 2
  call void @Py_IncRef(ptr %dtype)
  ; 1281 is NPY_ARRAY_CARRAY: contiguous, aligned, writeable.
  %array = call ptr @PyArray_NewFromDescr(
    ptr %type, ptr %dtype, i32 %ndim, ptr %lengths, ptr null, ptr %data, i32 1281, ptr null)
  %failed = icmp eq ptr %array, null
  br i1 %failed, label %none, label %made
none:
  ret ptr null
made:
  %borrowed = icmp eq ptr %block, null
  br i1 %borrowed, label %copy, label %own
copy:
  %copied = call ptr @PyArray_NewCopy(ptr %array, i32 0)
  call void @Py_DecRef(ptr %array)
  ret ptr %copied
own:
  %capsule = call ptr @PyCapsule_New(ptr %block, ptr null, ptr @release_capsule)
  %base = call i32 @PyArray_SetBaseObject(ptr %array, ptr %capsule)
  ret ptr %array
}

; Calls a shim, and returns a tuple of the arrays of its result, or None where the shim has refused an argument or raised.
; `spec` holds the address of the shim, None, the type of arrays and their number, and for each array the place of its first
; word, its dtype and its number of dimensions.
define ptr @forerun_call(ptr %spec, ptr %words) {
  ; Functions that numba compiled write their result and their exception to the first two arguments.
  %result = alloca i64
  %exception = alloca ptr
  store i64 0, ptr %result
  %shim = load ptr, ptr %spec
  %raised = call i32 %shim(ptr %result, ptr %exception, ptr %words)
  %refused = load i64, ptr %result
  %raised_long = zext i32 %raised to i64
  %wrong = or i64 %raised_long, %refused
  %good = icmp eq i64 %wrong, 0
  br i1 %good, label %right, label %mismatch
mismatch:
  %none_place = getelementptr i64, ptr %spec, i64 1
  %python_none = load ptr, ptr %none_place
  call void @Py_IncRef(ptr %python_none)
  ret ptr %python_none
right:
  %type_place = getelementptr i64, ptr %spec, i64 2
  %type = load ptr, ptr %type_place
  %count_place = getelementptr i64, ptr %spec, i64 3
  %count = load i64, ptr %count_place
  %tuple = call ptr @PyTuple_New(i64 %count)
  br label %next
next:
  %i = phi i64 [0, %right], [%after, %kept]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %make, label %done
make:
  %triple = mul i64 %i, 3
  %first = add i64 %triple, 4
  %place_slot = getelementptr i64, ptr %spec, i64 %first
  %place = load i64, ptr %place_slot
  %its_spec = getelementptr i64, ptr %place_slot, i64 1
  %its_words = getelementptr i64, ptr %words, i64 %place
  %array = call ptr @array_of(ptr %type, ptr %its_spec, ptr %its_words)
  %failed = icmp eq ptr %array, null
  br i1 %failed, label %none, label %kept
kept:
  %set = call i32 @PyTuple_SetItem(ptr %tuple, i64 %i, ptr %array)
  %after = add i64 %i, 1
  br label %next
none:
  call void @Py_DecRef(ptr %tuple)
  ret ptr null
done:
  ret ptr %tuple
}
